"""The check of exercise 10.4, ParallelGPT and init_std. `tplab.plain` says what's right."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from tplab import plain
from tplab.course.checks import twins
from tplab.course.checks.cases import GROUPS, Case, Place, random_tensor
from tplab.course.checks.describe import describe
from tplab.course.checks.observation import Claim, Observed, observe, portable
from tplab.course.checks.trials import OnRanks, exercise
from tplab.course.checks.twins import Twin
from tplab.course.exercises.ch10.weights import (
    BATCH,
    CONFIG,
    HIDDEN,
    LAYERS,
    LENGTH,
    MASKS,
    RATE,
    VOCABULARY,
    draws_once,
    part,
    random_weights,
)
from tplab.runtime import device
from tplab.tensor.full_state import load_full_state_dict
from tplab.tensor.rng import seed_all


@dataclass(frozen=True)
class Model(Case):
    """A call of the model. `what` is "logits", "loss", or "dropout", which has stand-ins for the layers."""

    what: str
    training: bool = True

    @property
    def rate(self) -> float:
        return RATE if self.what == "dropout" else 0.0

    def describe(self, name: str) -> str:
        calls = {"logits": "model(ids)", "loss": "model(ids, targets)", "dropout": "model(ids, rng=rng) with dropout"}
        return calls[self.what] + ", in eval mode" * (not self.training)


def stand_in(x: Tensor) -> Tensor:
    """Compute something simple in place of a layer, from [b, s, h] to [b, s, h]."""
    return 2 * x.tanh() + x.roll(1, -1)


class StandIn(nn.Module):
    """A stand-in for a layer, which sends nothing. It keeps the dtypes and the options of its calls."""

    def __init__(self, hidden_size: int, num_heads: int, **options: Any) -> None:
        super().__init__()
        self.given: list[dict[str, Any]] = []

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        self.given.append({"dtype": x.dtype, **options})
        return stand_in(x)


REFUSED = "a target in the padding is refused"


class Batch(NamedTuple):
    weights: dict[str, Tensor]  # the full ones
    ids: Tensor  # [b, s]
    targets: Tensor  # [b, s], where one target is ignored
    dlogits: Tensor  # [b, s, v]. A rank gets its shard, [b, s, padded v / p]
    dloss: Tensor  # []
    seed: int  # the tracker's seed


def draw_batch(case: Model, generator: torch.Generator, size: int) -> Batch:
    weights = random_weights(plain.GPT(CONFIG, dtype=torch.float64), generator)
    ids, targets = (torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator) for _ in range(2))
    ids[0, 0], ids[1, -1], targets[0, 1], targets[1, 2] = 0, VOCABULARY - 1, VOCABULARY - 1, -100
    dlogits, (dloss,) = random_tensor(generator, BATCH, LENGTH, VOCABULARY), random_tensor(generator, 1)
    return Batch(weights, ids, targets, dlogits, dloss, int(torch.randint(10**6, (), generator=generator)))


def columns(logits: Tensor, place: Place) -> Tensor:
    """Return this rank's columns of logits [.., v], which are padded with zeros to a multiple of 8 columns per rank."""
    return place.part(F.pad(logits, (0, -VOCABULARY % (8 * place.size))), -1)


def give_batch(case: Model, full: Batch, place: Place) -> Batch:
    return full._replace(dlogits=columns(full.dlogits, place))


def zeros_in_padding(out: Any) -> Any:
    """Replace -inf, which `parallel_logits` returns for padding, by 0, which a matmul with the padded table returns."""
    return out.masked_fill(out.isneginf(), 0) if isinstance(out, Tensor) and out.is_floating_point() else out


def run_model(gpt_class: Any, case: Model, given: Batch, group: Any) -> Observed:
    dropping = case.what == "dropout"
    config, layer_class = replace(CONFIG, dropout=case.rate), StandIn if dropping else None
    place: dict[str, Any] = {"device": device(), "dtype": case.dtype}
    model = gpt_class(config, layer_class, group=group, **place)
    full = {name: value.to(device()) for name, value in given.weights.items() if not dropping or "layers" not in name}
    load_full_state_dict(model, full, group)
    model.train(case.training and case.twin is not Twin.EVALUATION)
    tracker, twin = seed_all(given.seed, group), seed_all(given.seed, group)
    with twin.fork("replicated"):
        mask = F.dropout(torch.ones(BATCH, LENGTH, HIDDEN, **place), RATE)
    torch.manual_seed(dist.get_rank())
    inputs = {"ids": given.ids.to(device())} | ({"targets": given.targets.to(device())} if case.what == "loss" else {})
    seen = observe(
        lambda *inputs: zeros_in_padding(model(*inputs, rng=tracker)),
        (given.dloss if case.what == "loss" else given.dlogits).to(device()), inputs=inputs,
        parameters={name: param for name, param in model.named_parameters() if name in full},
    )  # fmt: skip
    if case.what == "loss":
        seen["out"] = twins.loss_in(case.twin, seen["out"])
        if device().type == "cpu":  # on a GPU, tplab's loss would stop the process instead of raising an error
            seen[REFUSED] = Claim(accepted(model, inputs["ids"]))
    if dropping:
        missed = any(call.get("rng") is not tracker for layer in model.layers for call in layer.given)
        seen["the layers get rng"] = Claim("a layer was called without rng=rng" if missed else "")
    return seen | {MASKS: [mask]}


def accepted(model: Any, ids: Tensor) -> str:
    """Return what the model returns for targets in the padding, or "" if it raises an error."""
    try:
        with torch.no_grad():
            loss = model(ids, torch.full_like(ids, VOCABULARY))
    except Exception:
        return ""
    return f"with vocab_size={VOCABULARY} and targets of {VOCABULARY}, model(ids, targets) returns {describe(loss)}"


def right_model(case: Model, full: Batch, place: Place) -> Observed:
    leaves = {name: value.clone().requires_grad_() for name, value in full.weights.items()}
    model = plain.GPT(CONFIG, dtype=torch.float64)
    if case.what == "dropout":
        x = leaves["embedding.weight"][full.ids] + leaves["positions.weight"][:LENGTH]
        x = stand_in(stand_in(x * place.observed[place.index][MASKS][0].cpu() if case.training else x))
        x = F.layer_norm(x, [HIDDEN], leaves["final_norm.weight"], leaves["final_norm.bias"])
        logits = x @ leaves["embedding.weight"].t()  # [b, s, v]
    else:
        logits = functional_call(model, leaves, (full.ids,))  # [b, s, v]
    loss = F.cross_entropy(logits.flatten(0, 1), full.targets.flatten())
    out, upstream = (loss, full.dloss) if case.what == "loss" else (logits, full.dlogits)
    names = [name for name in leaves if case.what != "dropout" or "layers" not in name]
    gradients = torch.autograd.grad(out, [leaves[name] for name in names], upstream)
    blocks = [("all_reduce", full.ids.numel() * HIDDEN)] * (1 if case.what == "dropout" else 1 + 2 * LAYERS)
    tokens = full.ids.numel()
    small = [("all_reduce", tokens), ("all_reduce", tokens + 1)] if case.what == "loss" else []
    return {
        "out": out.detach() if case.what == "loss" else columns(out.detach(), place),
        **{f"d{name}": part(name, value, place) for name, value in zip(names, gradients, strict=True)},
        "forward traffic": place.traffic(*blocks, *small), "backward traffic": place.traffic(*blocks),
    }  # fmt: skip


UNROUNDED = "the final norm reads the stream before it's rounded"
DROPPED = "the first layer reads the stream before it's rounded"


@dataclass(frozen=True)
class Float32Stream(Case):
    switch: bool = True

    def describe(self, name: str) -> str:
        return f"{name}(config, float32_residual={self.switch}, dtype=bfloat16)"


def run_dtypes(gpt_class: Any, case: Float32Stream, given: Any, group: Any) -> Observed:
    config = replace(CONFIG, dropout=RATE)
    model = gpt_class(config, StandIn, float32_residual=case.switch, device=device(), dtype=torch.bfloat16)
    normed, entering = list[torch.dtype](), list[Tensor]()
    model.layers[0].register_forward_pre_hook(lambda _, given: entering.append(given[0].detach()))
    model.final_norm.register_forward_pre_hook(lambda _, given: normed.append(given[0].dtype))
    logits = model(torch.zeros(BATCH, LENGTH, dtype=torch.int64, device=device()))
    streams = [str(call["dtype"]) for layer in model.layers for call in layer.given]
    rounded = case.switch and torch.bfloat16 in normed
    # dropout divides by 1 - RATE, and hardly any quotient is a bfloat16 number
    late = case.switch and any(x.dtype == torch.float32 and x.equal(x.bfloat16().float()) for x in entering)
    return {
        "dtypes of the stream in each layer": streams,
        UNROUNDED: Claim("it got bfloat16, although the stream is in float32" if rounded else ""),
        DROPPED: Claim("the first layer got numbers that were rounded to bfloat16" if late else ""),
        "dtype of the logits": str(getattr(logits, "dtype", None)),
    }


def right_dtypes(case: Float32Stream, given: Any, place: Place) -> Observed:
    stream = torch.float32 if case.switch else torch.bfloat16
    return {"dtypes of the stream in each layer": [str(stream)] * LAYERS, "dtype of the logits": str(torch.bfloat16)}


@dataclass(frozen=True)
class Depth(Case):
    """A model of which init_std gets the name of every matrix. With std=None, it isn't passed."""

    num_layers: int
    std: float | None = None

    @property
    def arguments(self) -> str:
        return f"num_layers={self.num_layers}" + (f", std={self.std}" if self.std else "")

    def names(self) -> list[str]:
        model = plain.GPT(replace(CONFIG, num_layers=self.num_layers), device="meta")
        return [name for name, param in model.named_parameters() if param.dim() == 2]

    def describe(self, name: str) -> str:
        return f"init_std(name, {self.arguments})"


def run_std(init_std: Any, case: Depth, given: Any, group: Any) -> Observed:
    options = {"std": case.std} if case.std else {}
    return {f"std of {name}": portable(init_std(name, case.num_layers, **options)) for name in case.names()}


def right_std(case: Depth, given: Any, place: Place) -> Observed:
    into_stream = {name: ".attention.out." in name or ".down." in name for name in case.names()}
    std, narrow = case.std or 0.02, (2.0 * case.num_layers) ** -0.5
    return {f"std of {name}": std * narrow if writes else std for name, writes in into_stream.items()}


exercise(
    "10.4", "ParallelGPT", takes=["ParallelGPT", "init_std"],
    trials=[
        OnRanks(
            cases=(Model("logits"), Model("loss"), Model("dropout"), Model("dropout", training=False),
                   Model("loss", groups=GROUPS)),
            draw=draw_batch, give=give_batch, run=run_model, right=right_model, world_sizes=(2, 4, 1),
            without=draws_once, part="ParallelGPT", of="ParallelGPT",
        ),
        OnRanks(
            cases=[Float32Stream(), Float32Stream(False)], run=run_dtypes, right=right_dtypes, world_sizes=(1,),
            without=tuple(Twin), part="ParallelGPT", of="ParallelGPT",
        ),
        OnRanks(
            of="init_std", cases=[Depth(2), Depth(1), Depth(3, std=0.1)], run=run_std, right=right_std,
            world_sizes=(1,), without=tuple(Twin), part="init_std",
        ),
    ],
    passed="Ten lines are enough for a GPT that computes what a single process would compute, on any number of ranks.",
)  # fmt: skip
