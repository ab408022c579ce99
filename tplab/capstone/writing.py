"""Generate text with a trained model. A run's newest checkpoint continues a prompt token by token, with a KV cache.

    from tplab.capstone import sample
    text = sample("runs/laptop", "def ")                           in a notebook or a program
    python -m tplab.capstone sample runs/laptop --prompt "def "    in a terminal

Any number of ranks can share the model, whatever the run's grid was. The first rank appends each piece of text to a
temporary file, and the process that waits for the ranks displays whatever has been added. A piece never ends inside a
character, even if a token does, because `DecodeStream` holds back those bytes until the rest of the character arrives.
"""

import argparse
import codecs
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import signature
from math import isfinite
from pathlib import Path

import torch
import torch.distributed as dist
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from tplab.capstone.checkpoints.folders import StepFolders
from tplab.capstone.data.prepare import TokenFiles
from tplab.capstone.settings.io import read_settings
from tplab.capstone.settings.run_folder import SETTINGS
from tplab.capstone.settings.settings import LARGEST_SEED, Settings, check_text
from tplab.capstone.training.step import TEMPERATURE, TOP_K, lower_precision
from tplab.checkpoint.sharded import load_sharded
from tplab.gpt.generation import stream
from tplab.gpt.model import ParallelGPT
from tplab.memory.config import check_tensor_parallel
from tplab.runtime import device, launch, torchrun
from tplab.runtime.devices import backend_for
from tplab.runtime.liveview import LiveView, Now, shown_by

_show_piece = partial(print, end="", flush=True)
_FLAGS: dict[str, tuple[type, str]] = {  # the arguments of `sample`
    "prompt": (str, "text to continue"),
    "tokens": (int, "number of new tokens"),
    "tp": (int, "number of ranks that share the model (default: as in the run)"),
    "step": (int, "use the checkpoint of this step (default: the newest)"),
    "temperature": (float, "larger values make unlikely tokens more frequent, and 0 takes the most likely one"),
    "top_k": (int, "draw from the N most likely tokens (0: from all)"),
    "seed": (int, "random seed, because the same seed gives the same text"),
}


@dataclass(frozen=True)
class Request:
    """What `sample` tells the ranks so that they can generate the text."""

    settings: Settings
    checkpoint: Path
    tokenizer: Tokenizer
    ids: list[int]  # the prompt's tokens
    end: int  # the token that ends the text
    vocab_size: int  # number of tokens that the tokenizer knows, which may be fewer than the model's
    tokens: int
    temperature: float
    top_k: int | None  # if None, tokens are drawn from the entire vocabulary
    seed: int


def sample(
    folder: str | Path,
    prompt: str = "def ",
    *,
    tokens: int = 200,
    tp: int | None = None,
    step: int | None = None,
    temperature: float = TEMPERATURE,
    top_k: int = TOP_K,
    seed: int = 0,
    show: Callable[[str], object] = _show_piece,
) -> str:
    """Continue the prompt with the model of the run in `folder`. Displays the text as it's generated, and returns it.

    tokens         number of new tokens; there are fewer if the model ends the document earlier
    tp             number of ranks that share the model; if None, as many as torchrun has started, or else the run's tp
    step           the checkpoint's step; if None, the newest checkpoint is used
    temperature    0 always takes the most likely token (greedy); larger values make unlikely tokens more frequent
    top_k          draw from only the k most likely tokens, or from all tokens if it's 0
    seed           random seed for drawing tokens; the same seed gives the same text
    show           called with each new piece of the text, beginning with the prompt

    If the text gets longer than the model's seq_length, the model continues from the second half of what it has read.
    Raises FileNotFoundError if there's no run or no checkpoint in the folder, and ValueError for a damaged checkpoint,
    for a prompt that is empty, longer than seq_length or not valid Unicode, and for other invalid arguments.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"there's no folder {folder}. Use the folder of a run, such as runs/laptop")
    if not (folder / SETTINGS).exists():
        raise FileNotFoundError(f"no run has been started in {folder}, because it has no {SETTINGS}")
    settings = read_settings(folder / SETTINGS)
    if tp is None:
        tp = int(os.environ["WORLD_SIZE"]) if torchrun.is_active() else settings.tp
    check_tensor_parallel(settings.model, tp)
    if tokens < 1 or top_k < 0:
        raise ValueError(f"tokens={tokens} should be 1 or more, and top_k={top_k} should be 0 or more")
    if not (isfinite(temperature) and temperature >= 0):
        raise ValueError(f"temperature={temperature} should be 0, for the most likely token, or a positive number")
    if not 0 <= seed <= LARGEST_SEED:
        raise ValueError(f"seed={seed} should be between 0 and 2^32 - 1 = {LARGEST_SEED}")
    check_text("prompt", prompt)
    checkpoint = _checkpoint_of(folder, step)
    files = TokenFiles(folder / "tokens")
    ids = files.tokenizer.encode(prompt).ids
    if not ids:
        raise ValueError('the prompt is empty, but the model needs some text to continue, such as --prompt "def "')
    if len(ids) > settings.seq_length:
        raise ValueError(
            f"the prompt has {len(ids)} tokens, but the model can only read seq_length={settings.seq_length}. Use a "
            "shorter prompt"
        )
    request = Request(
        settings, checkpoint, files.tokenizer, ids, files.end_of_text, files.vocab_size, tokens, temperature,
        top_k or None, seed,
    )  # fmt: skip
    return _write(request, tp, show)


def _write(request: Request, tp: int, show: Callable[[str], object]) -> str:
    if torchrun.is_active():
        return launch(_on_a_rank, tp, args=(request, show), timeout=None)[0]
    with tempfile.NamedTemporaryFile(prefix="tplab-") as file, shown_by(partial(_Follow, file.name, show)):
        append = partial(_append, file.name)
        return launch(_on_a_rank, tp, args=(request, append), backend=backend_for(tp), timeout=None)[0]


class _Follow(LiveView):
    """Displays what the first rank appends to a file. It runs in the process that waits for the ranks."""

    def __init__(self, path: str, show: Callable[[str], object], see: Callable[[], list[Now]]) -> None:
        super().__init__(see)
        self._path, self._place, self._show = path, 0, show
        self._decoder = codecs.getincrementaldecoder("utf-8")()

    def refresh(self) -> None:
        with open(self._path, "rb") as file:
            file.seek(self._place)
            data = file.read()
        self._place += len(data)
        if text := self._decoder.decode(data):
            self._show(text)

    close = refresh


def _append(path: str, text: str) -> None:
    with open(path, "ab") as file:
        file.write(text.encode())


def _on_a_rank(request: Request, show: Callable[[str], object]) -> str:
    settings, place = request.settings, device()
    dtype = torch.float64 if settings.precision == "float64" else torch.float32
    model = ParallelGPT(settings.model, device="meta", dtype=dtype).to_empty(device=place)
    load_sharded(request.checkpoint, model)
    text = ""
    with lower_precision(settings, place):
        for piece in _pieces(model, request, place):
            text += piece
            if dist.get_rank() == 0:
                show(piece)
    return text


def _pieces(model: ParallelGPT, request: Request, place: torch.device) -> Iterator[str]:
    """Yield the prompt and then the generated text, in pieces that never end inside a character."""
    decoding = DecodeStream(skip_special_tokens=True)
    for ids in (request.ids, _new_ids(model, request, place)):
        for number in ids:
            if piece := decoding.step(request.tokenizer, number):
                yield piece


def _new_ids(model: ParallelGPT, request: Request, place: torch.device) -> Iterator[int]:
    """Yield the new ids. When the text fills all positions, continue from its second half with a new cache."""
    length, read, left = request.settings.seq_length, request.ids, request.tokens
    chance = torch.Generator(place).manual_seed(request.seed)
    while left:
        more = min(left, length + 1 - len(read))  # the last token isn't read, so it needs no position
        for column in stream(
            model, torch.tensor([read], device=place), more, temperature=request.temperature, top_k=request.top_k,
            vocab_size=request.vocab_size, generator=chance,
        ):  # fmt: skip
            number = int(column)
            if number == request.end:
                return
            read = [*read, number]
            yield number
        left -= more
        read = read[-max(1, length // 2) :]


def _checkpoint_of(folder: Path, step: int | None) -> Path:
    """Return the path of the step's checkpoint, or of the newest if `step` is None."""
    folders = StepFolders(folder / "checkpoints")
    steps = folders.steps()
    if not steps:
        raise FileNotFoundError(
            f"the run in {folder} has no checkpoint yet. It saves one every save_every steps, and when you stop it"
        )
    if step is not None and step not in steps:
        raise FileNotFoundError(
            f"the run in {folder} has no checkpoint of step {step}. It has checkpoints of {', '.join(map(str, steps))}"
        )
    return folders.path(steps[-1] if step is None else step)


def main(argv: Sequence[str]) -> int:
    """Run the given command line and return its exit code. Raises what `sample` raises for invalid arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m tplab.capstone sample", allow_abbrev=False,
        description="Generate text with the newest checkpoint of a run.",
    )  # fmt: skip
    parser.add_argument("folder", type=Path, help="folder of the run, such as runs/laptop")
    for name, (kind, text) in _FLAGS.items():
        default = signature(sample).parameters[name].default
        parser.add_argument(
            "--" + name.replace("_", "-"), type=kind, default=default,
            metavar={int: "N", float: "X", str: "TEXT"}[kind],
            help=text if default is None else f"{text} (default: {default!r})",
        )  # fmt: skip
    sample(**vars(parser.parse_args(argv)))
    if not torchrun.is_active() or os.environ["RANK"] == "0":
        print()
    return 0
