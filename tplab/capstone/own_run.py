"""Chapter 15's runs: the learner's layers in the loop of train.py, and a plug that somebody pulls.

    launch(train_own, 2, args=(settings, answers, functions))                a run, or the rest of one
    launch(train_own, 2, args=(settings, answers, functions, Plug(18)))      rank 1 is killed in step 18

The loop is `tplab.capstone.learners_loop`. Around it, a run has what its settings ask for: text, tokenizer, model and
optimizer.
"""

import os
import signal
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import AdamW

from tplab.capstone.data.prepare import prepare
from tplab.capstone.learners_loop import Functions, load, name_of_shard, train
from tplab.capstone.settings.settings import Settings
from tplab.capstone.training.build_model import build_model
from tplab.capstone.training.optimizer import adamw_options
from tplab.capstone.training.ranks import Ranks, join
from tplab.capstone.training.trainer import write
from tplab.runtime import record

LOSSES = "losses.csv"  # in a run's folder


@dataclass(frozen=True)
class Plug:
    """When the rank `rank` gets SIGKILL: at the beginning of a step, or when it has written half of a checkpoint."""

    step: int
    saving: bool = False
    rank: int = 1


def train_own(settings: Settings, answers: Any, functions: Functions, plug: Plug | None = None) -> None:
    """Train until `settings.last_step`, from the newest checkpoint on. Every rank calls this.

    answers    the learner's layers (`find_answers`), for layers="mine"
    functions  the answers to chapter 15's exercises, or what stands in for them
    """
    torch.set_num_threads(1)
    ranks = join(settings)
    assert ranks.mesh is not None, "launch starts a process group even for a single rank"
    model, optimizer = _model_and_optimizer(settings, answers, ranks)
    tokens = torch.from_numpy(np.array(prepare(settings).train))  # a copy, because torch wants to write

    def tell(step: int, loss: float, norm: float) -> None:
        if ranks.rank == 0:
            with open(Path(settings.folder, LOSSES), "a") as file:
                file.write(f"{step},{loss!r},{norm!r}\n")

    train(
        model, optimizer, tokens, settings, ranks.mesh, _plugged(functions, plug), checkpoints_of(settings),
        settings.last_step, tell,
    )  # fmt: skip


def checkpoints_of(settings: Settings) -> Path:
    return Path(settings.folder, "checkpoints")


def losses_of(settings: Settings) -> dict[int, float]:
    """Return the loss of each step. If a step was computed twice, that's the loss of the second time."""
    rows = (row.split(",") for row in Path(settings.folder, LOSSES).read_text().split())
    return {int(step): float(loss) for step, loss, _ in rows}


def sample_of(settings: Settings, answers: Any, folder: Path) -> str:
    """Return what the model of the checkpoint `folder` writes after the prompt. Every rank calls this."""
    ranks, tokens = join(settings), prepare(settings)
    model, optimizer = _model_and_optimizer(settings, answers, ranks)
    load(folder, model, optimizer, ranks.group("tp"))
    return write(model, settings, tokens, settings.prompt, settings.sample_tokens, seed=settings.seed)


def messages_of(settings: Settings, answers: Any) -> dict[str, list[int]]:
    """Return the bytes of this rank's all-reduces in a micro-batch, by the part of the model that needs them.

    The parts are "embedding", "attention", "MLP" and "loss", each with "forward" or "backward". A backward pass has
    one all-reduce per split matmul that f feeds, in the opposite order. If it has others, all are under "backward".
    """
    ranks = join(settings)
    model, _ = _model_and_optimizer(settings, answers, ranks)
    ids = torch.zeros(settings.micro_batch_size, settings.seq_length, dtype=torch.long, device=ranks.device)
    layers = model.get_submodule("layers").children()
    blocks = [layer.get_submodule(name) for layer in layers for name in ("attention", "mlp")]
    with ExitStack() as open_sections:
        parts = [open_sections.enter_context(record())]  # before the first block, in it, and so on

        def next_part(*_: Any) -> None:
            open_sections.close()
            parts.append(open_sections.enter_context(record()))

        for block in blocks:
            block.register_forward_pre_hook(next_part)
            block.register_forward_hook(next_part)
        loss = model(ids, ids)
    names = ["embedding forward", "attention forward", "", "MLP forward"]
    found = {name: [call.bytes for call in part] for name, part in zip(names, parts, strict=False) if name}
    found["loss forward"] = [call.bytes for call in parts[-1]]
    with record() as backward:
        loss.backward()
    sent = [call.bytes for call in backward]
    if len(sent) == 1 + len(blocks):
        return found | {"loss backward": sent[:1], "MLP backward": sent[1:2], "attention backward": sent[2:3]}
    return found | {"backward": sent}


def _model_and_optimizer(settings: Settings, answers: Any, ranks: Ranks) -> tuple[nn.Module, AdamW]:
    model = build_model(settings, settings.model, mesh=ranks.mesh, device=ranks.device, answers=answers)
    options = adamw_options(model, settings) | {"fused": False}
    return model, AdamW(options.pop("parameters"), **options)


def _plugged(functions: Functions, plug: Plug | None) -> Functions:
    """Return functions that kill the rank when its plug is pulled."""
    if plug is None or dist.get_rank() != plug.rank:
        return functions
    step = 0

    def own_windows(done: int, *arguments: Any) -> Any:
        nonlocal step
        step = done + 1
        return functions.own_windows(done, *arguments)

    def training_step(*arguments: Any) -> Any:
        return _die() if step == plug.step and not plug.saving else functions.training_step(*arguments)

    def save_checkpoint(folder: Path, number: int, write: Any, *arguments: Any) -> Any:
        write = partial(_write_half, write) if number == plug.step and plug.saving else write
        return functions.save_checkpoint(folder, number, write, *arguments)

    return replace(functions, own_windows=own_windows, training_step=training_step, save_checkpoint=save_checkpoint)


def _write_half(write: Any, path: Path) -> NoReturn:
    write(path)
    own = path / name_of_shard(write.keywords["group"])
    os.truncate(own, own.stat().st_size // 2)
    _die()


def _die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("SIGKILL can't be caught")
