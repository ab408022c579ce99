"""The checks of exercises 10.3, ParallelTransformerLayer, and 10.4, ParallelGPT. `tplab.plain` says what's right."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from tplab import plain
from tplab.course.checks import (
    GROUPS,
    Case,
    Claim,
    Observed,
    Place,
    Traffic,
    Twin,
    observe,
    portable,
    random_tensor,
    traffic,
    twins,
)
from tplab.course.checks.trials import OnRanks, exercise
from tplab.memory.config import GPTConfig
from tplab.runtime import device, record
from tplab.tensor.full_state import load_full_state_dict
from tplab.tensor.rng import RNGTracker, seed_all

HIDDEN, HEADS, BATCH, LENGTH, KEYS, LAYERS, VOCABULARY, RATE = 8, 4, 2, 5, 7, 2, 37, 0.4
CONFIG = GPTConfig(
    num_layers=LAYERS, hidden_size=HIDDEN, num_heads=HEADS, vocab_size=VOCABULARY, seq_length=LENGTH + 1,
    activation="gelu_tanh", dropout=0.0,
)  # fmt: skip
MASKS = "masks"  # of dropout, in the order in which the blocks draw them
SPLIT = {  # (dimension, number of stacked matrices), by the end of a parameter's name. All others are replicated
    "attention.qkv": (0, 3), "cross_attention.q": (0, 1), "cross_attention.kv": (0, 2), "mlp.up": (0, 1),
    "attention.out.weight": (1, 1), "mlp.down.weight": (1, 1),
}  # fmt: skip


def part(name: str, full: Tensor, place: Place) -> Tensor:
    """Return a rank's shard of the parameter with this name. The rows of the embedding are padded first."""
    if name.endswith("embedding.weight"):
        return place.part(F.pad(full, (0, 0, 0, -VOCABULARY % (8 * place.size))))
    split = next((way for end, way in SPLIT.items() if f"{end}." in f"{name}."), None)
    return full if split is None else place.part(full, *split)


def random_weights(module: nn.Module, generator: torch.Generator) -> dict[str, Tensor]:
    """Return weights for a plain module, in which no bias is zero and every norm has an effect."""
    sizes = {name: value.shape for name, value in module.state_dict().items()}
    drawn = {name: random_tensor(generator, *shape) for name, shape in sizes.items()}
    tables = ("embedding.weight", "positions.weight")
    scales = {name: shape[1] ** -0.5 for name, shape in sizes.items() if len(shape) == 2 and name not in tables}
    drawn = {name: value * scales.get(name, 1.0) for name, value in drawn.items()}
    return {name: 1 + value / 2 if name.endswith("norm.weight") else value for name, value in drawn.items()}


class MaskedLayer(plain.Layer):
    """The plain layer, with given dropout masks for the outputs of its blocks."""

    masks: list[Tensor] = []

    def _block(self, x: Tensor, norm: Any, block: nn.Module, *args: Any, **options: Any) -> Tensor:
        normed = norm(x)
        y = block(normed, *args, **options)
        return (normed if self.post_norm else x) + (y * self.masks.pop(0) if self.masks else y)


def in_evaluation(case: Any) -> bool:
    return case.twin is Twin.EVAL_MODE or not case.training


# 10.3: a layer


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
    return Texts(weights, inputs, padding if case.padding else {}, random_tensor(generator, BATCH, LENGTH, HIDDEN), seed)


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


def draws_once(case: Any) -> tuple[Twin, ...]:
    return twins.DRAWS_ONCE if case.rate else ()


@dataclass(frozen=True)
class WideStream(Case):
    """A layer in float32 with a stream in float64, as bfloat16 and float32 in training, but with smaller errors."""

    def describe(self, name: str) -> str:
        return f"{name}({HIDDEN}, {HEADS}, dtype=float32) with x in float64"


FAR = 2.0**20  # what's added to every element of x, which a norm takes away again


def run_wide(layer_class: Any, case: WideStream, given: Texts, group: Any) -> Observed:
    layer = layer_class(HIDDEN, HEADS, device=device(), dtype=torch.float32)
    load_full_state_dict(layer, {name: value.to(device()) for name, value in given.weights.items()}, group)
    x = given.inputs["x"].to(device()) + FAR
    with record() as section:
        out = layer(x)
    added = out - x if isinstance(out, Tensor) and out.dtype == x.dtype and out.shape == x.shape else out
    return {"what the blocks add": portable(added), "forward traffic": traffic(section)}


def right_wide(case: WideStream, given: Texts, place: Place) -> Observed:
    x = given.inputs["x"]
    out = functional_call(plain_layer(Layer()), given.weights, (x,))
    sent = Traffic(call._replace(dtype="float32") for call in place.traffic(*[("all_reduce", x.numel())] * 2))
    return {"what the blocks add": out - x, "forward traffic": sent}


BUILT = (
    Layer(), Layer(causal=False, padding=True), Layer(cross=True), Layer(cross=True, padding=True), Layer(post=True),
    Layer(post=True, cross=True, groups=GROUPS), Layer(rate=RATE), Layer(rate=RATE, cross=True),
    Layer(rate=RATE, training=False),
)  # fmt: skip

exercise(
    "10.3", "ParallelTransformerLayer", takes=["ParallelTransformerLayer"],
    trials=[
        OnRanks(
            cases=BUILT, draw=draw_texts, run=run_layer, right=right_layer, world_sizes=(2, 4, 1), without=draws_once
        ),
        OnRanks(
            cases=[WideStream()], draw=lambda case, generator, size: draw_texts(Layer(), generator, size),
            run=run_wide, right=right_wide, tol=1e-4, world_sizes=(2,), without=tuple(Twin), part="float32 stream",
        ),
    ],
    passed="Each block sends one message in each direction. Norms, biases, dropout, and residuals send nothing.",
)  # fmt: skip

# 10.4: a GPT


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
    model.train(case.training and case.twin not in (Twin.EVALUATION, Twin.EVAL_MODE))
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
    if dropping:
        missed = any(call.get("rng") is not tracker for layer in model.layers for call in layer.given)
        seen["the layers get rng"] = Claim("a layer was called without rng=rng" if missed else "")
    return seen | {MASKS: [mask]}


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


@dataclass(frozen=True)
class Float32Stream(Case):
    switch: bool = True

    def describe(self, name: str) -> str:
        return f"{name}(config, float32_residual={self.switch}, dtype=bfloat16)"


def run_dtypes(gpt_class: Any, case: Float32Stream, given: Any, group: Any) -> Observed:
    model = gpt_class(CONFIG, StandIn, float32_residual=case.switch, device=device(), dtype=torch.bfloat16)
    logits = model(torch.zeros(BATCH, LENGTH, dtype=torch.int64, device=device()))
    streams = [str(call["dtype"]) for layer in model.layers for call in layer.given]
    return {"dtypes of the stream in each layer": streams, "dtype of the logits": str(getattr(logits, "dtype", None))}


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
            of="init_std", cases=[Depth(2), Depth(12), Depth(3, std=0.1)], run=run_std, right=right_std,
            world_sizes=(1,), without=tuple(Twin), part="init_std",
        ),
    ],
    passed="Ten lines are enough for a GPT that computes what a single process would compute, on any number of ranks.",
)  # fmt: skip
