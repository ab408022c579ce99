"""A pytest plugin that writes a line of JSON per event, so that outcomes are known even if the process is killed.

    {"collected": [names]}    {"started": name}    {"test": name, "outcome": ..., "seconds": ..., "text": ...}

It leaves out the tests whose outcomes are known already. It also gives every test a limit of its own, because the
tests' own limits are meant for machines that have more time.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest

FOLDER, LIMIT = "TPLAB_GPU_CHECK_FOLDER", "TPLAB_GPU_CHECK_LIMIT"  # environment variables
EVENTS, KNOWN = "events", "known"  # files in this folder; KNOWN is a list of tests


class Outcomes:
    def __init__(self, folder: Path) -> None:
        self._file = open(folder / EVENTS, "a", encoding="utf-8")  # noqa: SIM115 (it's open until the process ends)
        self._known = set(json.loads((folder / KNOWN).read_text(encoding="utf-8")))

    def note(self, **event: Any) -> None:
        self._file.write(json.dumps(event) + "\n")
        self._file.flush()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self.note(collected=[item.nodeid for item in items])
        items[:] = [item for item in items if item.nodeid not in self._known]
        for item in items:
            item.add_marker(pytest.mark.timeout(float(os.environ[LIMIT])), append=False)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.note(started=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        text = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
        printed = "".join(f"\n-- {name}\n{content}" for name, content in report.sections) if report.failed else ""
        self.note(test=report.nodeid, outcome=report.outcome, seconds=report.duration, text=text + printed)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Outcomes(Path(os.environ[FOLDER])), "outcomes of the GPU check")
