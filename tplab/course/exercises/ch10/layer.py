"""The check of exercise 10.3, ParallelTransformerLayer. `tplab.plain` says what's right."""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from tplab import plain
from tplab.course.checks.cases import GROUPS, Case, Place, random_tensor
from tplab.course.checks.observation import Claim, Observed, observe, portable
from tplab.course.checks.recorded_traffic import Traffic, traffic
from tplab.course.checks.trials import OnRanks, exercise
from tplab.course.checks.twins import Twin
from tplab.course.exercises.ch10.weights import (
    BATCH,
    CONFIG,
    HEADS,
    HIDDEN,
    KEYS,
    LENGTH,
    MASKS,
    RATE,
    draws_once,
    part,
    random_weights,
)
from tplab.runtime import device, record
from tplab.tensor.full_state import load_full_state_dict
from tplab.tensor.rng import RNGTracker, seed_all


class MaskedLayer(plain.Layer):
    """The plain layer, with given dropout masks for the outputs of its blocks."""

    masks: list[Tensor] = []

    def _block(self, x: Tensor, norm: Any, block: nn.Module, *args: Any, **options: Any) -> Tensor:
        normed = norm(x)
        y = block(normed, *args, **options)
        return (normed if self.post_norm else x) + (y * self.masks.pop(0) if self.masks else y)


def in_evaluation(case: Any) -> bool:
    return case.twin is Twin.EVALUATION or not case.training


@dataclass(frozen=True)
class Layer(Case):
    """A way to build and run a layer. `padding` says whether some tokens of x and of the memory are padding."""

    causal: bool = True
    cross: bool = False
    post: bool = False
    padding: bool = False
    rate: float = 0.0
    training: bool = True

    @property
    def options(self) -> dict[str, Any]:
        made: dict[str, Any] = {} if self.causal else {"causal": False}
        made |= {"cross_attention": True} if self.cross else {}
        made |= {"hidden_dropout": self.rate} if self.rate else {}
        return made | ({"apply_residual_connection_post_layernorm": True} if self.post else {})

    def describe(self, name: str) -> str:
        options = [f"{key}={value}" for key, value in self.options.items()] + ["group=group"] * bool(self.groups)
        call = f"{name}({', '.join([str(HIDDEN), str(HEADS), *options])})"
        return call + ", with padding" * self.padding + ", in eval mode" * (not self.training)


class Texts(NamedTuple):
    weights: dict[str, Tensor]  # the full ones
    inputs: dict[str, Tensor]  # x [b, s, h], and a decoder's memory [b, t, h]
    padding: dict[str, Tensor]  # by the names of the arguments
    dout: Tensor  # [b, s, h]
    seed: int  # the tracker's seed


def plain_layer(case: Layer) -> MaskedLayer:
    return MaskedLayer(
        CONFIG, causal=case.causal, cross_attention=case.cross, post_norm=case.post, dtype=torch.float64
    )  # fmt: skip


def draw_texts(case: Layer, generator: torch.Generator, size: int) -> Texts:
    inputs = {"x": random_tensor(generator, BATCH, LENGTH, HIDDEN)}
    inputs |= {"memory": random_tensor(generator, BATCH, KEYS, HIDDEN)} if case.cross else {}
    padding = {"key_padding_mask": torch.zeros(BATCH, LENGTH, dtype=torch.bool)}
    padding["key_padding_mask"][1, 3:] = True
    if case.cross:
        padding["memory_padding_mask"] = torch.zeros(BATCH, KEYS, dtype=torch.bool)
        padding["memory_padding_mask"][0, 4:] = True
    seed = int(torch.randint(10**6, (), generator=generator))
    weights = random_weights(plain_layer(case), generator)
    return Texts(
        weights, inputs, padding if case.padding else {}, random_tensor(generator, BATCH, LENGTH, HIDDEN), seed
    )


def run_layer(layer_class: Any, case: Layer, given: Texts, group: Any) -> Observed:
    place: dict[str, Any] = {"device": device(), "dtype": case.dtype}
    layer = layer_class(HIDDEN, HEADS, **case.options, group=group, **place)
    load_full_state_dict(layer, {name: value.to(device()) for name, value in given.weights.items()}, group)
    if not case.training:
        layer.eval()
    tracker, twin = seed_all(given.seed, group), seed_all(given.seed, group)
    with twin.fork("replicated"):
        masks = [F.dropout(torch.ones(BATCH, LENGTH, HIDDEN, **place), case.rate) for _ in range(2 + case.cross)]
    torch.manual_seed(dist.get_rank())  # so that a mask from torch's current state differs between ranks
    asked = watch_rng(layer, tracker)
    params, padding = dict(layer.named_parameters()), {name: mask.to(device()) for name, mask in given.padding.items()}
    seen = observe(
        partial(layer, **padding, rng=tracker), given.dout.to(device()),
        inputs={name: value.to(device()) for name, value in given.inputs.items()},
        parameters={name: params.get(name) for name in given.weights}, any_size=None if case.padding else 0,
    )  # fmt: skip
    return seen | asked() | {MASKS: masks}


def watch_rng(layer: Any, tracker: RNGTracker) -> Any:
    """Watch which random states the attention blocks get. Returns a function that returns the statements about that."""
    missed: dict[str, str] = {}

    def watch(name: str, given: dict[str, Any]) -> None:
        if given.get("rng") is not tracker:
            missed[name] = "it was called without rng=rng"

    blocks = {name: getattr(layer, name, None) for name in ("attention", "cross_attention")}
    names = [name for name, block in blocks.items() if isinstance(block, nn.Module)]
    for name in names:
        blocks[name].register_forward_pre_hook(  # type: ignore[union-attr]
            lambda _, __, given, name=name: watch(name, given), with_kwargs=True
        )
    return lambda: {f"the {name.replace('_', '-')} draws from rng": Claim(missed.get(name, "")) for name in names}


def right_layer(case: Layer, given: Texts, place: Place) -> Observed:
    leaves = {name: value.clone().requires_grad_() for name, value in {**given.weights, **given.inputs}.items()}
    layer = plain_layer(case)
    if case.rate and not in_evaluation(case):
        layer.masks = [mask.cpu().double() for mask in place.observed[place.index][MASKS]]
    weights, inputs = ({name: leaves[name] for name in names} for names in (given.weights, given.inputs))
    out = functional_call(layer, weights, tuple(inputs.values()), given.padding)
    gradients = dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), given.dout), strict=True))
    sizes = [given.inputs["x"].numel()] * (2 + case.cross)
    back = [*sizes, *[given.inputs["memory"].numel()] * case.cross] if case.cross else sizes
    return {
        "out": out.detach(),
        **{f"d{name}": part(name, gradients[name], place) for name in (*given.inputs, *given.weights)},
        "forward traffic": place.traffic(*(("all_reduce", size) for size in sizes)),
        "backward traffic": place.traffic(*(("all_reduce", size) for size in back)),
    }  # fmt: skip


@dataclass(frozen=True)
class WideStream(Case):
    """A layer in float32 with a stream in float64, as bfloat16 and float32 in training, but with smaller errors."""

    post: bool = False

    def describe(self, name: str) -> str:
        post = ", apply_residual_connection_post_layernorm=True" * self.post
        return f"{name}({HIDDEN}, {HEADS}, dtype=float32{post}) with x in float64"


FAR = 2.0**20  # what's added to every element of x, which a norm takes away again


def run_wide(layer_class: Any, case: WideStream, given: Texts, group: Any) -> Observed:
    post = {"apply_residual_connection_post_layernorm": True} if case.post else {}
    layer = layer_class(HIDDEN, HEADS, device=device(), dtype=torch.float32, **post)
    load_full_state_dict(layer, {name: value.to(device()) for name, value in given.weights.items()}, group)
    x = given.inputs["x"].to(device()) + FAR
    with record() as section:
        out = layer(x)
    sent = {"forward traffic": traffic(section)}
    if case.post:
        return {"out": portable(out)} | sent
    added = out - x if isinstance(out, Tensor) and out.dtype == x.dtype and out.shape == x.shape else out
    return {"what the blocks add": portable(added)} | sent


def right_wide(case: WideStream, given: Texts, place: Place) -> Observed:
    x = given.inputs["x"]
    out = functional_call(plain_layer(Layer(post=case.post)), given.weights, (x,))
    sent = Traffic(call._replace(dtype="float32") for call in place.traffic(*[("all_reduce", x.numel())] * 2))
    return ({"out": out} if case.post else {"what the blocks add": out - x}) | {"forward traffic": sent}


BUILT = (
    Layer(), Layer(causal=False, padding=True), Layer(cross=True), Layer(cross=True, padding=True), Layer(post=True),
    Layer(post=True, cross=True, groups=GROUPS), Layer(rate=RATE), Layer(rate=RATE, cross=True),
    Layer(rate=RATE, cross=True, training=False),
)  # fmt: skip

exercise(
    "10.3", "ParallelTransformerLayer", takes=["ParallelTransformerLayer"],
    trials=[
        OnRanks(
            cases=BUILT, draw=draw_texts, run=run_layer, right=right_layer, world_sizes=(2, 4, 1), without=draws_once
        ),
        OnRanks(
            cases=[WideStream(), WideStream(post=True)],
            draw=lambda case, generator, size: draw_texts(Layer(), generator, size), run=run_wide,
            right=right_wide, tol=1e-4, world_sizes=(2,), without=tuple(Twin), part="float32 stream",
        ),
    ],
    passed="Each block sends one message in each direction. Norms, biases, dropout, and residuals send nothing.",
)  # fmt: skip
