"""Plain nbval judges a solved chapter: it passes, and another result of a check fails."""

import json
import os
import re
import subprocess
import sys

from tests.course import tiny


def test_plain_nbval_compares_the_results_of_checks(tmp_path, monkeypatch):
    """One check shows what it should; of the other, the notebook expects another text."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    tiny.make(tmp_path, tiny.source(2))
    path = tmp_path / "solutions" / "90_tiny.ipynb"
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace("Exercise 90.2 passed", "Exercise 90.2 surpassed"), encoding="utf-8")
    cells = [cell["id"] for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # the others take longer to import than nbval runs
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-p", "nbval.plugin", "--nbval-lax"]
    done = subprocess.run([*command, "-c", os.devnull, path], capture_output=True, text=True, cwd=tmp_path)
    outcomes = dict(re.findall(r"::Cell (\d+) (PASSED|FAILED)", done.stdout))
    failed = [cells[int(cell)] for cell, outcome in outcomes.items() if outcome == "FAILED"]
    assert (len(outcomes), failed) == (len(cells), ["check-90-2"]), done.stdout
