"""Generate text with a trained model. A run's newest checkpoint continues a prompt token by token, with a KV cache.

    from tplab.capstone import sample
    text = sample("runs/laptop", "def ")                           in a notebook or a program
    python -m tplab.capstone sample runs/laptop --prompt "def "    in a terminal

The model is shared by as many ranks as in the run, or by all ranks that torchrun has started.
"""

import argparse
import os
from collections.abc import Sequence
from math import isfinite
from pathlib import Path

import torch

from tplab.capstone.checkpoints.folders import StepFolders
from tplab.capstone.data.prepare import TokenFiles
from tplab.capstone.settings.io import read_settings
from tplab.capstone.settings.run_folder import SETTINGS
from tplab.capstone.settings.settings import LARGEST_SEED, Settings
from tplab.capstone.training.trainer import TEMPERATURE, write
from tplab.checkpoint.sharded import load_sharded
from tplab.gpt.model import ParallelGPT
from tplab.memory.config import check_tensor_parallel
from tplab.runtime import device, launch, torchrun
from tplab.runtime.devices import backend_for


def sample(
    folder: str | Path, prompt: str = "def ", *, tokens: int = 200, temperature: float = TEMPERATURE, seed: int = 0
) -> str:
    """Continue the prompt with the model of the run in `folder`. Returns the text, including the prompt.

    tokens         number of new tokens; there are fewer if the model ends the document earlier
    temperature    0 always takes the most likely token (greedy); larger values make unlikely tokens more frequent
    seed           random seed for drawing tokens; the same seed gives the same text

    An empty prompt means the beginning of a text. If the text gets longer than the model's seq_length, the model
    continues from the second half of what it has read, and of a longer prompt, it reads only the end. Raises
    FileNotFoundError if there's no run or no checkpoint in the folder, and ValueError for a prompt that isn't valid
    Unicode, and for other invalid arguments.
    """
    folder = Path(folder)
    if not (folder / SETTINGS).exists():
        raise FileNotFoundError(f"no run has been started in {folder}. Use the folder of a run, such as runs/laptop")
    settings = read_settings(folder / SETTINGS)
    tp = int(os.environ["WORLD_SIZE"]) if torchrun.is_active() else settings.tp
    check_tensor_parallel(settings.model, tp)
    if tokens < 1:
        raise ValueError(f"tokens={tokens} should be 1 or more")
    if not (isfinite(temperature) and temperature >= 0):
        raise ValueError(f"temperature={temperature} should be 0, for the most likely token, or a positive number")
    if not 0 <= seed <= LARGEST_SEED:
        raise ValueError(f"seed={seed} should be between 0 and 2^32 - 1 = {LARGEST_SEED}")
    prompt.encode()  # raises UnicodeEncodeError, which is a ValueError, if it has bytes that aren't UTF-8
    checkpoints = StepFolders(folder / "checkpoints")
    if not (steps := checkpoints.steps()):
        raise FileNotFoundError(
            f"the run in {folder} has no checkpoint yet. It saves one every save_every steps, and when you stop it"
        )
    files = TokenFiles(folder / "tokens")
    wanted = settings, checkpoints.path(steps[-1]), files.folder, prompt, tokens, temperature, seed
    return launch(_written, tp, args=wanted, backend=backend_for(tp), timeout=None)[0]


def _written(
    settings: Settings, checkpoint: Path, files: Path, prompt: str, tokens: int, temperature: float, seed: int
) -> str:
    """Return the prompt and the new text. All ranks call this and return the same."""
    dtype = torch.float64 if settings.precision == "float64" else torch.float32
    model = ParallelGPT(settings.model, device="meta", dtype=dtype).to_empty(device=device())
    load_sharded(checkpoint, model)
    return write(model, settings, TokenFiles(files), prompt, tokens, temperature=temperature, seed=seed)


def main(argv: Sequence[str]) -> int:
    """Run the given command line and return its exit code. Raises what `sample` raises for invalid arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m tplab.capstone sample", allow_abbrev=False,
        description="Generate text with the newest checkpoint of a run.",
    )  # fmt: skip
    parser.add_argument("folder", type=Path, help="folder of the run, such as runs/laptop")
    parser.add_argument("--prompt", default="def ", metavar="TEXT", help="text to continue (default: %(default)r)")
    parser.add_argument("--tokens", type=int, default=200, metavar="N", help="new tokens (default: %(default)s)")
    text = "larger values make unlikely tokens more frequent, 0 takes the most likely one (default: %(default)s)"
    parser.add_argument("--temperature", type=float, default=TEMPERATURE, metavar="X", help=text)
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="the same seed gives the same text")
    text = sample(**vars(parser.parse_args(argv)))
    if not torchrun.is_active() or os.environ["RANK"] == "0":
        print(text)
    return 0
