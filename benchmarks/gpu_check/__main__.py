"""Run the GPU check: see `benchmarks.gpu_check`."""

import argparse
import importlib.util
import os
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks import gpu_check
from benchmarks.gpu_check import report
from benchmarks.gpu_check.items import Item, items
from benchmarks.gpu_check.runner import FAILED, GRACE_SECONDS, Results, affordable, fingerprint, run
from tplab.common.files import replace

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "gpu-check"


def main() -> int:
    began = time.monotonic()
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_check", description=gpu_check.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--seconds", type=float, default=720, help="how long this call may take (720)")
    parser.add_argument("--report", type=Path, default=FOLDER / "report.md", help="where the report goes")
    parser.add_argument("--results", type=Path, default=FOLDER / "results.json", help="what earlier calls have found")
    parser.add_argument("--fresh", action="store_true", help="forget what earlier calls have found")
    parser.add_argument(
        "--only", nargs="+", metavar="TEXT", default=[""], help="only the items whose names contain one of these"
    )
    options = parser.parse_args()
    try:
        place = report.where()
    except RuntimeError as error:
        parser.error(str(error))
    facts = report.facts()
    chosen = [
        item for item in items(place, torch.cuda.device_count()) if any(text in item.name for text in options.only)
    ]
    if not chosen:
        parser.error(f"no item's name contains {' or '.join(options.only)}")
    lacking = {item.name: missing for item in chosen if (missing := missing_modules(item))}
    plan = [item for item in chosen if item.name not in lacking]
    if options.fresh:
        options.results.unlink(missing_ok=True)
    results = Results.read(options.results, fingerprint(ROOT, *facts.values()))
    folders = {str(ROOT): ".", os.path.realpath(tempfile.gettempdir()): "<temporary>"}
    print(report.REHEARSALS.get(place, "The GPU check"), flush=True)
    for name, missing in lacking.items():
        print(f"{name}: can't run without {', '.join(missing)}", flush=True)

    def write_report() -> None:
        options.report.parent.mkdir(parents=True, exist_ok=True)
        replace(options.report, report.text_of(facts, place, plan, results, lacking, folders).encode())

    until = began + options.seconds - GRACE_SECONDS
    for item, seconds in affordable(results.left(plan), time.monotonic, until):
        print(f"{item.name} ...", end=" ", flush=True)
        results.items[item.name] = run(ROOT, item, seconds)
        print(report.outcome_of(results.items[item.name]), flush=True)
        results.write()
        write_report()
    write_report()
    return _end(plan, results, options.report, time.monotonic() - began)


def missing_modules(item: Item) -> list[str]:
    return [name for name in item.modules if importlib.util.find_spec(name) is None]


def _end(plan: list[Item], results: Results, path: Path, seconds: float) -> int:
    """Print the last line, and return the exit status, which is 0 if nothing has failed."""
    failed = [item.name for item in plan if (found := results.items.get(item.name)) and found.state == FAILED]
    rest = results.left(plan)
    parts = [f"{len(plan) - len(rest) - len(failed)} of {len(plan)} items passed"]
    parts += [f"{len(failed)} failed ({', '.join(failed)})"] if failed else []
    parts += [f"{len(rest)} were not reached"] if rest else []
    print(f"{', '.join(parts)}, after {seconds:.0f} s. The report is in {path}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
