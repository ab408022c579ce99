"""What holds for every test: one thread per rank, temporary files of its own, slow tests first, no skip in silence.

With CI set, a test that would be skipped fails instead (a missing tool there is a fault of the build); tests marked
`gpu` are the exception. Without CI, a skipped test says what it needs and the rest go on. But on a machine with a GPU,
a run of tests marked `gpu` fails if all of them were skipped.
"""

import os
import shutil
import signal
import sys
import tempfile
from collections import Counter
from functools import cache

os.environ.setdefault("OMP_NUM_THREADS", "1")  # several ranks share two cores; set before torch is imported
os.environ.setdefault("MPLBACKEND", "Agg")  # figures are drawn into memory

import pytest

sys.modules["rfc3987_syntax"] = None  # type: ignore[assignment]  # a grammar of URLs that nbformat would load for 1.7 s

# A folder for the temporary files of this process and its children, so that a test which looks for what a run left
# behind does not see the files of another. pytest's own folders stay where they always are.
os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
SCRATCH = tempfile.mkdtemp(prefix="pytest-scratch-", dir=os.environ["PYTEST_DEBUG_TEMPROOT"])
os.environ["TMPDIR"] = tempfile.tempdir = SCRATCH

# A shell has its background processes ignore Ctrl-C, and they pass that on. Many tests press it
signal.signal(signal.SIGINT, signal.default_int_handler)

HAS_GPU = os.path.exists("/dev/nvidiactl")  # even if torch shows none; only tests marked `gpu` see it
IN_CI = bool(os.environ.get("CI"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if (skipped := _only_skipped_on_a_gpu(terminalreporter)) is not None:
        why = "; ".join(f"{count} times: {reason}" for reason, count in Counter(map(_reason, skipped)).items())
        terminalreporter.write_line(
            f"This machine has a GPU, but all {len(skipped)} GPU tests were skipped. {why}", red=True
        )


def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and _only_skipped_on_a_gpu(reporter) is not None:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _only_skipped_on_a_gpu(reporter: pytest.TerminalReporter) -> list[pytest.TestReport] | None:
    """The reports of the skipped tests, if this machine has a GPU and all tests are marked `gpu` and were skipped."""
    stats = reporter.stats
    skipped = [report for report in stats.get("skipped", []) if isinstance(report, pytest.TestReport)]
    ran = any(stats.get(outcome) for outcome in ("passed", "failed", "error", "xfailed", "xpassed"))
    here = HAS_GPU or "EMULATED_GPUS" in os.environ
    return skipped if here and skipped and not ran and all("gpu" in report.keywords for report in skipped) else None


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Slow tests and the browser first, so that no process has one left when the others are done.

    `--dist loadgroup` keeps each file in one process, except where the file says otherwise, and for emulated GPUs.
    """
    items.sort(key=_turn)
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            file = item.nodeid.partition("::")[0]
            item.add_marker(pytest.mark.xdist_group(item.nodeid if "/emulated_gpu/" in file else file))


def pytest_unconfigure() -> None:
    shutil.rmtree(SCRATCH, ignore_errors=True)


@pytest.hookimpl(tryfirst=True)  # before fixtures of any scope are made, since they launch ranks, too
def pytest_runtest_setup(item: pytest.Item) -> None:
    if HAS_GPU:
        _show_gpus(item.get_closest_marker("gpu") is not None)
    if item.get_closest_marker("gpu"):
        import torch  # here, since most runs of single tests can do without

        if not torch.cuda.is_available():
            pytest.skip(f"needs an NVIDIA GPU, and PyTorch {torch.__version__} shows none")


@cache
def _all_gpus() -> str | None:
    """CUDA_VISIBLE_DEVICES as it was. This process looks at the GPUs first: it looks once, whatever is said later."""
    import torch

    torch.cuda.is_available()
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def _show_gpus(visible: bool) -> None:
    """Let launches see the GPUs, or none. A launch hands its environment to its ranks and to their fork server."""
    all_of_them = _all_gpus()
    if not visible:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif all_of_them is None:
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = all_of_them


def _turn(item: pytest.Item) -> bool:
    return not any(item.get_closest_marker(name) for name in ("slow", "browser"))


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
