"""The check for exercise 10.3, in which learners split a checkpoint in GPT-2's format into each rank's shards."""

from collections.abc import Callable, Mapping
from itertools import product
from typing import Any

import torch
from torch import Tensor

from tplab.course import checks
from tplab.course.exercises.ch10 import plain
from tplab.memory.config import GPTConfig

THEIRS = {
    "attention_norm": "ln_1",
    "attention.qkv": "attn.c_attn",
    "attention.out": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}
ENDS = {"embedding": "transformer.wte", "positions": "transformer.wpe", "final_norm": "transformer.ln_f"}
HIDDEN, HEADS, LENGTH = 8, 4, 6

NOT_TURNED = "this rank's part of the weight as it lies in the checkpoint, not transposed"
OTHER_DIM = "this rank's part when the weight [out, in] is cut along the other dimension"
CONTIGUOUS = "this rank's part when [Q; K; V] is cut as one block"
BY_HEADS = "this rank's part when the rows are sorted head by head, q k v of each"
UNPADDED = "rows of the table that begin where they would without padding"
NAMES_QUESTION = "the names are those of ParallelGPT"
SAME_STATE = "state holds what it held"
OTHER_LAYER = "this rank's part of the same tensor of another layer"
OTHER_NORM = "the other norm of the layer"


def their_name(ours: str) -> str:
    start, _, end = ours.rpartition(".")
    if start in ENDS:
        return f"{ENDS[start]}.{end}"
    _, number, name = start.split(".", 2)
    return f"transformer.h.{number}.{THEIRS[name]}.{end}"


def in_their_format(whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert weights to GPT-2's format, which has other names and stores linear weights as [in, out].

    The result also contains the weight of the output layer and the causal masks, as old checkpoints do.
    """
    state = {}
    for name, value in whole.items():
        linear = name.startswith("layers.") and value.dim() == 2
        state[their_name(name)] = value.t().contiguous() if linear else value.clone()
    state["lm_head.weight"] = state["transformer.wte.weight"]
    for number in range(sum("ln_1.weight" in name for name in state)):
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        state[f"transformer.h.{number}.attn.bias"] = mask.view(1, 1, LENGTH, LENGTH)
        state[f"transformer.h.{number}.attn.masked_bias"] = torch.tensor(-1e4)
    return state


def mistakes(name: str, state: Mapping[str, Tensor], rank: int, p: int, multiple: int) -> dict[str, Tensor]:
    """Return the values that common mistakes would produce on a rank for the tensor with this name."""
    made, whole = {}, state[name]
    if name.startswith("layers.1."):
        made[OTHER_LAYER] = plain.cut(name, state[name.replace("layers.1.", "layers.0.")], rank, p, multiple)
    for one, other in (("attention_norm", "mlp_norm"), ("mlp_norm", "attention_norm")):
        if one in name:
            made[OTHER_NORM] = state[name.replace(one, other)]
    linear = name.startswith("layers.") and whole.dim() == 2
    if linear:
        lying = whole.t()
        dim = 1 if name.endswith(("out.weight", "down.weight")) else 0
        made[NOT_TURNED] = lying.chunk(p, dim)[rank] if lying.shape[dim] % p == 0 else lying
        made[OTHER_DIM] = whole.chunk(p, 1 - dim)[rank]
    if "qkv" in name:
        made |= {CONTIGUOUS: whole.chunk(p)[rank]} if p > 1 else {}
        made[BY_HEADS] = torch.cat(
            [part for heads in zip(*(w.chunk(HEADS) for w in whole.chunk(3)), strict=True) for part in heads]
        ).chunk(p)[rank]
    if "embedding" in name and p > 1:
        rows = len(plain.cut(name, whole, rank, p))
        start = rank * (len(whole) // p)
        made[UNPADDED] = torch.cat([whole, whole.new_zeros(rows, whole.shape[1])])[start : start + rows]
        repeated = torch.cat([whole, whole[-1:].expand(p * rows - len(whole), -1)])
        made["the rows with the last one repeated as padding"] = repeated.chunk(p)[rank]
    return made


@checks.exercise("10.3", "From GPT-2's checkpoint to shards")
def gpt2_checkpoint(gpt2_shards: Callable[..., Any]) -> checks.Verdict:
    generator = checks.fresh_generator()
    for p in checks.WORLD_SIZES:
        for twin, (layers, vocab_size, multiple) in product(checks.twins.ALONE, ((2, 37, 8), (1, 36, 4), (11, 36, 4))):
            config = GPTConfig(
                num_layers=layers, hidden_size=HIDDEN, num_heads=HEADS, vocab_size=vocab_size, seq_length=LENGTH
            )
            whole = plain.gpt_weights(generator, layers, HIDDEN, vocab_size, LENGTH)
            whole = checks.twins.expected(twin, whole)
            state = checks.twins.given(twin, in_their_format(whole))
            snapshot = checks.Snapshot(**state)
            seen, expected, alike = [], [], []
            for rank in range(p):
                call = f"gpt2_shards(state, config, rank={rank}, world_size={p}, multiple={multiple})"
                given = dict(state)
                with checks.twins.calling(twin, call, CRASH) as watch:
                    mine = gpt2_shards(given, config, rank, p, multiple)
                expected.append({name: plain.cut(name, value, rank, p, multiple) for name, value in whole.items()})
                alike.append({name: mistakes(name, whole, rank, p, multiple) for name in whole})
                lost = [name for name in {**state, **given} if given.get(name) is not state.get(name)]
                claims = watch.claims({"shards": mine}) | {
                    "inputs unchanged": snapshot.changed(),
                    SAME_STATE: checks.Claim(", ".join(lost[:3])),
                }
                seen.append(observed(mine, expected[-1]) | claims)
            right = [{NAMES_QUESTION: "yes", "result": "a dictionary"} | mine for mine in expected]
            note = f"{layers} layers, v = {vocab_size}, multiple = {multiple}" + (
                f", {checks.twins.note(twin)}" if twin else ""
            )
            checks.verify(
                "10.3",
                p,
                seen,
                right,
                questions=[*checks.twins.asked_first(twin), *questions(seen)],
                lookalikes=checks.by_name(alike),
                note=note,
            )
    return checks.Verdict("Every tensor under its name, turned where it lay [in, out], cut where it is sharded.")


def observed(mine: Any, right: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return what the check compares on a rank. If a name is missing from `mine`, the others are still compared."""
    if not isinstance(mine, Mapping):
        return {"result": f"a {type(mine).__name__}"}
    missing = [name for name in right if name not in mine]
    extra = [str(name) for name in mine if name not in right]
    said = [f"{len(missing)} missing: {', '.join(missing[:2])}"] * bool(missing)
    said += [f"{len(extra)} too many: {', '.join(extra[:2])}"] * bool(extra)
    return {
        "result": "a dictionary",
        NAMES_QUESTION: "; ".join(said) or "yes",
        **{n: mine[n] for n in right if n in mine},
    }


def questions(seen: list[dict[str, Any]]) -> list[checks.Question]:
    def kinds(d: Any, *labels: str) -> bool:
        return any(difference.kind in labels for difference in d)

    return [
        checks.INPUTS_QUESTION,
        checks.Question(
            lambda d: SAME_STATE in d.names,
            "The dictionary belongs to the caller, who loads the next rank from it. Which line takes something out of "
            "it, or puts something in?",
        ),
        checks.Question(
            lambda d: "result" in d.names, "The result is a dictionary, {name: tensor}. What does yours return?"
        ),
        checks.Question(
            lambda d: any("too many" in str(mine.get(NAMES_QUESTION)) for mine in seen) and NAMES_QUESTION in d.names,
            "ParallelGPT has no parameter of that name. Its output layer is tied, so it has no weight of its own; and "
            "the masks of old checkpoints are not parameters. Which names do you build, and from what?",
        ),
        checks.Question(
            lambda d: NAMES_QUESTION in d.names,
            "A parameter of ParallelGPT gets nothing. Is it a bias, a norm, or a tensor outside the layers that your "
            "loop does not reach?",
        ),
        checks.Question(
            lambda d: kinds(d, OTHER_LAYER),
            "Layer 1 gets what belongs to layer 0. Does the number of the layer stand in both names, yours and theirs?",
        ),
        checks.Question(
            lambda d: kinds(d, OTHER_NORM),
            "The two norms of a layer have changed places. Which of ln_1 and ln_2 stands before the attention?",
        ),
        checks.Question(
            lambda d: kinds(d, "other rank"),
            "A rank gets the part of another one. Which number do you hand to `shard` at each of your cuts?",
        ),
        checks.Question(
            lambda d: kinds(d, CONTIGUOUS, BY_HEADS),
            "Queries, keys and values are three matrices in one. Rank 0 must get its heads of each of them, q, then "
            "k, then v. How many blocks does your cut know of?",
        ),
        checks.Question(
            lambda d: kinds(d, NOT_TURNED, "transposed"),
            "GPT-2's linear weights lie [in, out], yours [out, in]. Which of them do you transpose, the square one "
            "too, and do you cut before or after?",
        ),
        checks.Question(
            lambda d: "dtype" in d.kinds(),
            "The checkpoint's numbers are copied as they are. Which line changes their dtype?",
        ),
        checks.Question(
            lambda d: all("embedding" in name for name in d.names),
            "The table is padded at its end, with rows of zeros, to a multiple of `multiple * world_size` rows; then "
            "each rank takes as many. How many rows does the padded table have here, and what stands in the last ones?",
        ),
        checks.Question(
            lambda d: (
                any(name.endswith("bias") or "norm" in name or "positions" in name for name in d.names)
                and not any(name.endswith(("out.weight", "down.weight", "up.weight", "qkv.weight")) for name in d.names)
            ),
            "The bias of a column-parallel layer is cut with its rows; a bias behind g, a norm and the positions are "
            "whole on every rank. Which of the two is this one?",
        ),
        checks.Question(
            lambda d: True,
            "Which layers are cut by columns of A, so by rows of their weight [out, in], and which by rows of A? Go "
            "through the table above and cut the right dimension of each.",
        ),
    ]


CRASH = (
    "Print the names and shapes of `state`. GPT-2's linear weights lie [in, out], yours [out, in]: has the tensor the "
    "dimension that you cut, at this line already? And this is a plain function: `rank` and `world_size` are "
    "arguments, there is no process group to ask."
)
