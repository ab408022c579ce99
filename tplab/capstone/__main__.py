"""The command line, `python -m tplab.capstone`: train a GPT and show its progress, or report on a run.

    python -m tplab.capstone --preset laptop                               start the ranks here and train on them
    torchrun --standalone --nproc-per-node 8 -m tplab.capstone --tp 8      train on the ranks that torchrun has started
    python -m tplab.capstone sample runs/laptop --prompt "def "            write text with a run's newest checkpoint
    python -m tplab.capstone report runs/laptop                            write the report of a run
    python -m tplab.capstone study --preset laptop                         measure the other figures in the report

To resume a run, run the same command again. The exit code is 0 if the run is finished or was stopped on request after
saving a checkpoint, 1 if the run failed, and 2 if the command can't be carried out.
"""

import argparse
import os
import socket
import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module

from tplab.capstone.command import carry_out, settings_from
from tplab.capstone.settings.io import add_arguments

_FIRST_LINES = """Train a GPT on this machine's GPUs, or on its CPU, with tensor, pipeline and data parallelism.

    python -m tplab.capstone --preset laptop
    python -m tplab.capstone --preset llama --tp 1 --pp 2
    torchrun --standalone --nproc-per-node 8 -m tplab.capstone --tp 8
    torchrun --standalone --nproc-per-node 8 -m tplab.capstone --tp 2 --pp 2 --dp 2 --zero 1

Without torchrun, the command starts tp · pp · dp processes itself. For several machines, see
tplab/capstone/capstone.slurm. To stop a run, press Ctrl-C, send SIGTERM, or `touch FOLDER/stop`. It then saves a
checkpoint. Run the same command again to resume from the newest checkpoint.

If a rank fails, torchrun ends all of them. With --max-restarts 3, it restarts them up to three times, and they resume
from the newest checkpoint.

Without --preset and --config, the settings are those of the run in --folder, if there is one. Otherwise, a preset is
chosen to fit this machine.

other commands:
    python -m tplab.capstone sample FOLDER     generate text with the newest checkpoint of a run
    python -m tplab.capstone report FOLDER     write a report about a run
    python -m tplab.capstone study [flags]     take the additional measurements that a report needs
"""


_OTHERS = {
    "sample": "tplab.capstone.writing", "report": "tplab.capstone.report", "study": "tplab.capstone.study.run",
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run the given command line and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = arguments.pop(0) if arguments[:1] and arguments[0] in _OTHERS else ""
    try:
        if name:  # imported here because training doesn't need it
            return import_module(_OTHERS[name]).main(arguments)
        given = vars(parser().parse_args(arguments))
        fresh = given.pop("fresh", False)
        return carry_out(settings_from(given), fresh=fresh)
    except (ValueError, OSError, ImportError) as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":  # once per machine, because only one may be misconfigured
            where = f" (rank {os.environ['RANK']}, on {socket.gethostname()})" if "RANK" in os.environ else ""
            print(f"python -m tplab.capstone{name and ' ' + name}{where}: {error}", file=sys.stderr)
        return 2


def parser() -> argparse.ArgumentParser:
    """Create the argument parser for a training run."""
    made = argparse.ArgumentParser(
        prog="python -m tplab.capstone",
        usage="python -m tplab.capstone [--preset NAME] [--config FILE] [flags]",
        description=_FIRST_LINES,
        formatter_class=partial(argparse.RawDescriptionHelpFormatter, max_help_position=34, width=110),
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    add_arguments(made)
    made.add_argument(
        "--fresh", action="store_true", help="start over, and move the previous run in this folder to before-1/"
    )
    return made


if __name__ == "__main__":
    sys.exit(main())
