"""Test that ranks can start and communicate here, with an all-reduce by `tplab.launch` in a separate process.

If it fails, `python -m tplab.course.tools.doctor.trial` shows the launcher's full report.
"""

import json
import sys
from dataclasses import dataclass

from tplab.course.tools.doctor.chapters import COURSE_RANKS
from tplab.course.tools.doctor.findings import BAD, GOOD, Finding
from tplab.course.tools.doctor.probe import PATIENCE, ask

AGAIN = "python -m tplab.course.tools.doctor.trial shows the whole report"
_TRY = "import sys; sys.stderr = open('/dev/null', 'w'); from tplab.course.tools.doctor.trial import main; main({})"


@dataclass(frozen=True)
class Trial:
    """The result of one launch.

    right: whether the sum was right on every rank
    error: the launcher's report, if the launch failed
    """

    ranks: int
    backend: str = ""
    seconds: float = 0.0
    right: bool = False
    error: str = ""


Try = tuple[int, str]  # number of ranks, backend


def tries(gpus: int) -> list[Try]:
    """Return the launches to try.

    The first one starts two ranks over the backend that the course uses. If there are GPUs, but only the capstone uses
    NCCL on them, a second one starts up to two ranks over NCCL.
    """
    return [(2, "auto")] + ([(min(2, gpus), "nccl")] if 0 < gpus < COURSE_RANKS else [])


def attempt(wanted: list[Try]) -> list[Trial]:
    """Run these launches one after another, and return their results."""
    try:
        told = ask(_TRY.format(wanted), PATIENCE * 2)
    except RuntimeError as error:
        return [Trial(wanted[0][0], error=str(error))]
    return [Trial(**one) for one in told["trials"]]


def judge(trials: list[Trial]) -> Finding:
    for trial in trials:
        name = f"{trial.ranks} rank{'' if trial.ranks == 1 else 's'}"
        if trial.error:
            return Finding("ranks", BAD, f"{name} can't be run:\n{trial.error}", AGAIN)
        if not trial.right:
            return Finding("ranks", BAD, f"{name} add up wrong numbers over {trial.backend}", AGAIN)
    each = (f"{trial.ranks} over {trial.backend} in {trial.seconds:.1f} s" for trial in trials)
    return Finding("ranks", GOOD, f"an all-reduce works: {', '.join(each)}, the start included")


# Everything below runs in the separate process


def add_up() -> tuple[float, str]:
    """All-reduce the numbers 1, 2, ... over the ranks, and return the sum and the backend. It runs on every rank."""
    import torch
    import torch.distributed as dist

    import tplab

    mine = torch.tensor([dist.get_rank() + 1.0], device=tplab.device())  # [1]
    dist.all_reduce(mine)
    return mine.item(), dist.get_backend()


def main(wanted: list[Try]) -> None:
    """Try each number of ranks with its backend, and print the results as JSON."""
    import time

    from tplab import launch

    trials = []
    for number, backend in wanted:
        start = time.monotonic()
        try:
            results = list(launch(add_up, number, backend=backend))
        except Exception as error:  # we want to report whatever the launcher raises
            trials.append(Trial(number, error=str(error).strip() or type(error).__name__))
            break
        right = all(value == number * (number + 1) / 2 for value, _ in results)
        trials.append(Trial(number, results[0][1], round(time.monotonic() - start, 2), right))
    print(json.dumps({"trials": [vars(trial) for trial in trials]}))


if __name__ == "__main__":
    main([(int(number), "auto") for number in sys.argv[1:]] or [(2, "auto")])
