"""What holds for every test: one thread per rank, quick tests first, and nothing skipped in silence.

With CI set, a test that would be skipped fails instead (a missing tool there is a fault of the build); tests marked
`gpu` are the exception. Without CI, a skipped test says what it needs and the rest go on.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # several ranks share two cores; set before torch is imported
os.environ.setdefault("MPLBACKEND", "Agg")  # figures are drawn into memory

import pytest

IN_CI = bool(os.environ.get("CI"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Quick tests first, then the slow ones, then the browser; each file (or named group) stays in one process."""
    items.sort(key=_cost)
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))


def _cost(item: pytest.Item) -> int:
    if item.get_closest_marker("browser"):
        return 2
    return 1 if item.get_closest_marker("slow") else 0


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item):
    report = yield
    may_skip = item.get_closest_marker("gpu") is not None or hasattr(report, "wasxfail")
    if IN_CI and report.skipped and not may_skip:
        report.outcome = "failed"
        report.longrepr = f"skipped, which CI does not allow: {_reason(report)}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector):
    report = yield
    if IN_CI and report.skipped:
        report.outcome = "failed"
        report.longrepr = f"{collector.nodeid} was skipped, which CI does not allow: {_reason(report)}"
    return report


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    return report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
