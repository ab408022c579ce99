"""Compare the calibrated cost model with real steps of the capstone's laptop preset, on 1 and 2 ranks in turns.

    python -m benchmarks.calibration [ROUNDS]

For each round, it prints the predicted and measured times and the predicted and measured speedup of two ranks.
"""

import os
import sys
from dataclasses import replace
from statistics import median

from tplab import launch
from tplab.capstone.planning.predictions import calibrated_step
from tplab.capstone.settings.io import PRESETS
from tplab.capstone.study import programs

STEPS, WARM_UP = 20, 4


def main(rounds: int = 3) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    for turn in range(1, rounds + 1):
        predicted, measured = {}, {}
        for p in (1, 2):
            settings = replace(PRESETS["laptop"], tp=p)
            kernels, seconds = launch(programs.timed, p, args=(settings, STEPS))[0]
            predicted[p], measured[p] = sum(calibrated_step(settings, kernels).values()), median(seconds[WARM_UP:])
        steps = "; ".join(
            f"p = {p}: {1e3 * predicted[p]:.0f} ms predicted, {1e3 * measured[p]:.0f} measured "
            f"({predicted[p] / measured[p] - 1:+.0%})"
            for p in (1, 2)
        )
        ratios = [times[1] / times[2] for times in (predicted, measured)]
        print(f"round {turn}: {steps}; speedup {ratios[0]:.2f} and {ratios[1]:.2f} ({ratios[0] / ratios[1] - 1:+.0%})")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
