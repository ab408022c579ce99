"""The cases of the check of exercise 10.2: how a learner's GPT is called on a rank, and what is seen of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from tplab.course.chapters.ch10.gpt_questions import GETS_CACHE, GETS_RNG
from tplab.course.checks import GROUPS, IN_GROUPS, Claim, Observed, make_group, observe
from tplab.memory.config import GPTConfig
from tplab.runtime import device
from tplab.tensor.full_state import load_full_state_dict
from tplab.tensor.rng import seed_all

LAYERS, HIDDEN, HEADS, VOCAB, BATCH, LENGTH, RATE = 2, 8, 4, 37, 2, 6, 0.4
PIECES = (3, 1, 2)


@dataclass(frozen=True)
class Case:
    """What is asked of the model: "logits", "loss", "dropout" with a stand-in layer, or "cache"."""

    what: str
    training: bool = True
    groups: tuple[tuple[int, ...], ...] | None = None

    def note(self, name: str) -> str:
        calls = {
            "logits": "model(ids)",
            "loss": "model(ids, targets)",
            "dropout": "model(ids, rng=rng) with dropout, and a layer of the check's",
            "cache": f"model(ids, cache=cache, past=past) with {', '.join(map(str, PIECES))} tokens",
        }
        return calls[self.what] + ("" if self.training else ", in eval mode") + (f" {IN_GROUPS}" if self.groups else "")


CASES = (
    Case("logits"),
    Case("loss"),
    Case("dropout"),
    Case("dropout", training=False),
    Case("cache", training=False),
    Case("loss", groups=GROUPS),
)


class StandIn(nn.Module):
    """In place of a layer: notes what it is called with, and sends nothing."""

    def __init__(self, hidden_size: int, num_heads: int, **options: Any) -> None:
        super().__init__()
        self.given: list[dict[str, Any]] = []

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        self.given.append(options)
        return 2 * x.tanh() + x.roll(1, -1)

    def new_cache(self, batch_size: int, max_length: int) -> None:
        return None


def stand_in(x: Tensor) -> Tensor:
    return 2 * x.tanh() + x.roll(1, -1)


def run_gpt(gpt_class: Any, cases: Sequence[Case], data: Sequence[Sequence[dict[str, Any]]]) -> list[Observed]:
    """On a rank: every case, one after the other."""
    return [run_case(gpt_class, case, mine[dist.get_rank()]) for case, mine in zip(cases, data, strict=True)]


def run_case(gpt_class: Any, case: Case, mine: dict[str, Any]) -> Observed:
    group = make_group(case.groups)
    replaced = case.what == "dropout"
    config = GPTConfig(
        num_layers=LAYERS, hidden_size=HIDDEN, num_heads=HEADS, vocab_size=VOCAB, seq_length=LENGTH,
        activation="gelu_tanh", dropout=RATE if replaced else 0.0,
    )  # fmt: skip
    place: dict[str, Any] = {"device": device(), "dtype": torch.float64}
    model = gpt_class(config, StandIn if replaced else None, group=group, **place)
    full = {k: v.to(device()) for k, v in mine["full"].items() if not (replaced and k.startswith("layers."))}
    load_full_state_dict(model, full, group)
    model.train(case.training)
    ids, targets = mine["ids"].to(device()), mine["targets"].to(device())
    if case.what == "cache":
        return in_pieces(model, ids)
    tracker, twin = seed_all(mine["seed"], group), seed_all(mine["seed"], group)
    with twin.fork("replicated"):
        mask = F.dropout(torch.ones(BATCH, LENGTH, HIDDEN, **place), RATE)
    torch.manual_seed(dist.get_rank())
    watched = {name: param for name, param in model.named_parameters() if name in full}
    arguments = {"ids": ids, "targets": targets} if case.what == "loss" else {"ids": ids}
    upstream = mine["dloss"] if case.what == "loss" else mine["dlogits"]
    seen = observe(
        lambda *given: model(*given, rng=tracker), upstream.to(device()), inputs=arguments, parameters=watched
    )
    if replaced:
        given = [options for layer in model.layers for options in layer.given]
        missed = any(options.get("rng") is not tracker for options in given)
        seen[GETS_RNG] = Claim("a layer was called without rng=rng" if missed else "")
    return {**seen, "mask": mask}


def in_pieces(model: Any, ids: Tensor) -> Observed:
    """The logits when the text comes in pieces, with a cache."""
    cache, outs, past = model.new_cache(BATCH, LENGTH), [], 0
    with torch.no_grad():
        for piece in ids.split(PIECES, dim=1):
            outs.append(model(piece, cache=cache, past=past))
            past += piece.shape[1]
    kept = [layer.text.length for layer in cache]
    wrong = f"after {LENGTH} tokens the layers' caches hold {kept}" if set(kept) != {LENGTH} else ""
    fits = all(isinstance(out, Tensor) and out.dim() == 3 for out in outs)
    return {"out": torch.cat(outs, 1) if fits else outs[0], GETS_CACHE: Claim(wrong)}
