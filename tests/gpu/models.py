"""Cases: GPTs, dropout, a compiled layer."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from tests.gpu.subject import (
    HALF,
    SINGLE,
    Case,
    Place,
    Tensors,
    layer,
    of_weights,
    random_weights,
    shapes_of,
    whole_gradients,
)
from tplab import plain
from tplab.gpt.model import ParallelGPT
from tplab.memory.config import GPTConfig
from tplab.sequence.gpt import SequenceParallelGPT, allreduce_sequence_parallel_gradients
from tplab.tensor.full_state import load_full_state_dict
from tplab.tensor.mlp import ParallelMLP
from tplab.tensor.operators import all_gather
from tplab.tensor.rng import dropout, seed_all

B, S, SEED = 2, 8, 5
GPT2 = GPTConfig(num_layers=2, hidden_size=64, num_heads=8, vocab_size=150, seq_length=S, dropout=0.0)
LLAMA = replace(
    GPT2, num_kv_heads=2, ffn_hidden_size=96, gated=True, bias=False, tied_embedding=False, learned_positions=False
)
IDS = {"ids": (GPT2.vocab_size, (B, S)), "targets": (GPT2.vocab_size, (B, S))}


def plain_gpt(config: GPTConfig) -> nn.Module:
    return plain.GPT(config, device="meta")


def _gpt(config: GPTConfig, kind: type[ParallelGPT] = ParallelGPT, **options: Any) -> Case:
    def make(place: Place) -> nn.Module:
        return kind(config, **place.options, **options)

    def finish(model: nn.Module) -> None:
        allreduce_sequence_parallel_gradients(model)  # nothing to do where the sequence isn't cut

    rounds = None if config.learned_positions else SINGLE  # rotary angles, as in Llama
    theirs = plain_gpt(config)
    return layer(shapes_of(theirs), {}, make, of_weights(theirs), finish=finish, ids=IDS, rounds=rounds)


def _under_autocast(case: Case) -> Case:
    """Both programs with float32 weights, and products in bfloat16."""

    def mixed(program: Any, place: Place) -> Tensors:
        with torch.autocast(place.device.type, torch.bfloat16, enabled=place.dtype == SINGLE):
            return program(place)

    return replace(
        case, parallel=partial(mixed, case.parallel), plain=partial(mixed, case.plain), rounds=HALF, dtypes=(SINGLE,)
    )


# Dropout: drawn on the device, so plain torch has to be seeded for it, and only there


def _masks(place: Place) -> Tensors:
    tracker, x = seed_all(SEED, None), torch.ones(1000, **place.options)
    kept = {name: [dropout(x, 0.5, sharded=name == "sharded", rng=tracker) for _ in range(2)] for name in tracker_names}
    return {name: torch.stack(all_gather(torch.cat(masks))) for name, masks in kept.items()}


tracker_names = ("replicated", "sharded")


def _masks_plainly(place: Place) -> Tensors:
    def drawn(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return torch.cat([F.dropout(torch.ones(1000, **place.options), 0.5) for _ in range(2)])

    ranks = range(dist.get_world_size())
    return {
        "replicated": torch.stack([drawn(SEED + 1359) for _ in ranks]),
        "sharded": torch.stack([drawn(SEED + 2718 + rank) for rank in ranks]),
    }


def _with_dropout(recompute: Any, kind: type[ParallelGPT], place: Place) -> Tensors:
    """A loss and its gradients. What is computed again in backward has to draw the same again."""
    model = kind(replace(GPT2, dropout=0.3), recompute=recompute, **place.options)
    load_full_state_dict(model, random_weights(plain_gpt(GPT2), place, 8))
    ids, targets = (place.integers(high, shape, seed) for seed, (high, shape) in enumerate(IDS.values()))
    loss = model(ids, targets, rng=seed_all(SEED))
    loss.backward()
    allreduce_sequence_parallel_gradients(model)
    return {"loss": loss, **whole_gradients(model)}


def _again(recompute: Any, kind: type[ParallelGPT] = ParallelGPT) -> Case:
    return Case(partial(_with_dropout, recompute, kind), partial(_with_dropout, "nothing", kind), draws=True)


def compiled_mlp(backend: str) -> Case:
    """The collectives in a compiled graph are other ones, the functional: see tplab/runtime/functional_hooks.py."""
    theirs = plain.MLP(64, 128, device="meta")

    def make(place: Place) -> nn.Module:
        torch._dynamo.reset()
        module = ParallelMLP(64, 128, **place.options)
        module.compile(backend=backend, fullgraph=True)
        return module

    return layer(shapes_of(theirs), {"x": (B, S, 64)}, make, of_weights(theirs), dtypes=(SINGLE,))


CASES: dict[str, Case] = {
    "gpt": _gpt(GPT2),
    "gpt, llama": _gpt(LLAMA, async_grad_allreduce=True),
    "gpt, layers computed again": _gpt(GPT2, recompute="layers"),
    "gpt, autocast": _under_autocast(_gpt(GPT2)),
    "sequence parallel gpt": _gpt(GPT2, SequenceParallelGPT),
    "sequence parallel gpt, llama": _gpt(LLAMA, SequenceParallelGPT, gather_again=True),
    "sequence parallel gpt, autocast": _under_autocast(_gpt(GPT2, SequenceParallelGPT)),
    "dropout": Case(_masks, _masks_plainly, draws=True),
    "dropout, attention computed again": _again("attention"),
    "dropout, layers computed again": _again("layers"),
    "dropout, sequence parallel": _again("layers", SequenceParallelGPT),
    "compiled": compiled_mlp("aot_eager"),
}
