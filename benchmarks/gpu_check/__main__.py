"""Run the GPU check: see `benchmarks.gpu_check`."""

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

import torch

from benchmarks import gpu_check
from benchmarks.gpu_check import report, runner
from benchmarks.gpu_check.items import ROOT, items
from tplab.common.files import replace


def main() -> int:
    """Run the items, and return the exit status, which is 0 if nothing has failed."""
    began = time.monotonic()
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_check", description=gpu_check.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--seconds", type=float, default=720, help="how long this call may take (720)")
    parser.add_argument(
        "--report", type=Path, default=ROOT / "build" / "gpu-check" / "report.md",
        help="where the report goes, and next to it, in results.json, what later calls need to know",
    )  # fmt: skip
    parser.add_argument(
        "--only", nargs="+", metavar="TEXT", default=[""], help="only the items whose names contain one of these"
    )
    options = parser.parse_args()
    try:
        place = report.where()
    except RuntimeError as error:
        parser.error(str(error))
    plan = [it for it in items(place, torch.cuda.device_count()) if any(text in it.name for text in options.only)]
    if not plan:
        parser.error(f"no item's name contains {' or '.join(options.only)}")
    facts, path = report.facts(), options.report.with_name("results.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    of = runner.fingerprint(ROOT, *facts.values())
    results = runner.read(path, of)
    print(report.REHEARSALS.get(place, "The GPU check"), flush=True)
    until = began + options.seconds - runner.GRACE_SECONDS
    for item, seconds in runner.affordable(runner.left(plan, results), time.monotonic, until):
        print(f"{item.name} ...", end=" ", flush=True)
        results[item.name] = runner.run(ROOT, item, seconds)
        print(report.outcome_of(results[item.name]), flush=True)
        runner.write(path, of, results)
        replace(options.report, report.text_of(facts, place, plan, results).encode())
    replace(options.report, report.text_of(facts, place, plan, results).encode())
    states = Counter(results[item.name].state if item.name in results else "not reached" for item in plan)
    ended = f"{states.pop(runner.PASSED, 0)} of {len(plan)} items passed"
    rest = "".join(f", {count} {state}" for state, count in states.items())
    print(f"{ended}{rest}, after {time.monotonic() - began:.0f} s. The report is in {options.report}")
    return int(states[runner.FAILED] > 0)


if __name__ == "__main__":
    sys.exit(main())
