"""Tables that say which exercises a GPT is built from, and what is whose in it. Nothing is run here.

    3.2 f, 3.3 g  ->  4.1, 4.2 linear layers  ->  5.2 MLP        ->  10.1 layer  ->  10.2 GPT
                                              ->  6.2 attention  ->
                  ->  7.3 embedding, 7.4 logits                                  ->
                  ->  8.5 loss                                                   ->

With `sequence_parallel`, f becomes the all-gather of 12.1, and g its reduce-scatter, so the same answers make another
model. The loss keeps g, because it sums values of all tokens.
"""

from collections.abc import Collection, Mapping

from tplab.capstone.settings.settings import Settings

F, G = "copy_to_region", "reduce_from_region"
NOT_CALLED = "not called"
DOES_WITHOUT = "no other cell calls it: they have tplab's by another way, or do without"

# exercise -> the names that its answer defines
ANSWERS: dict[str, tuple[str, ...]] = {
    "3.2": ("CopyToRegion",),
    "3.3": ("ReduceFromRegion",),
    "4.1": ("ColumnParallelLinear",),
    "4.2": ("RowParallelLinear",),
    "5.2": ("ParallelMLP",),
    "6.1": ("split_heads", "attend", "merge_heads"),
    "6.2": ("ParallelAttention",),
    "7.1": ("pad_vocab_size", "vocab_range"),
    "7.2": ("parallel_lookup",),
    "7.3": ("VocabParallelEmbedding",),
    "7.4": ("parallel_logits",),
    "8.1": ("vocab_max",),
    "8.2": ("vocab_logsumexp",),
    "8.3": ("target_logit",),
    "8.4": ("VocabParallelCrossEntropy",),
    "8.5": ("vocab_parallel_loss",),
    "10.1": ("ParallelTransformerLayer",),
    "10.2": ("ParallelGPT",),
    "11.3": ("LinearAsync",),
    "12.1": ("GatherFromSequence", "ReduceScatterToSequence"),
    "12.3": ("allreduce_sequence_gradients",),
    "14.4": ("gradient_norm",),
}


def whole_world(settings: Settings) -> bool:
    """Return True if all ranks share one model. Answers that don't take a group work only in this case."""
    return settings.dp == 1


def is_async(settings: Settings) -> bool:
    """Return True if 11.3 does the matmuls. It can't with sequence parallelism, because it all-reduces dx."""
    return settings.async_grad_allreduce and not settings.sequence_parallel


def needed(settings: Settings | None = None) -> list[str]:
    """Return the exercises whose answers a model with these settings is built from (None: with any settings)."""
    if settings is None:
        return list(ANSWERS)
    leave = set()
    if not whole_world(settings):
        leave |= {"3.2", "3.3", "12.1"}
    if settings.sequence_parallel:
        leave |= {"3.2"}
    else:
        leave |= {"12.1", "12.3"}
    if not is_async(settings):
        leave |= {"11.3"}
    return [exercise for exercise in ANSWERS if exercise not in leave]


def check_answers(whose: Mapping[str, str], settings: Settings) -> None:
    """Raise ValueError if an answer is missing because `find_answers` was called with different settings."""
    if missing := [exercise for exercise in needed(settings) if exercise not in whose]:
        raise ValueError(
            f"the answers to {', '.join(missing)} were not looked for: a model of these settings needs them. Pass the "
            "settings to find_answers"
        )


def used(whose: Mapping[str, str], settings: Settings, idle: Collection[str] = frozenset()) -> list[dict[str, str]]:
    """Return the origin of a model's parts as rows of "what", "whose", "source", "why". `idle`: see `TrainingHooks`."""
    check_answers(whose, settings)
    world, cut = whole_world(settings), settings.sequence_parallel
    groups = f"the answer takes all ranks, and here dp={settings.dp} groups of {settings.tp} share a model each"
    product = "its product is that of 11.3" if is_async(settings) else ""
    if cut:
        regions = ("12.1", "") if world else ("tplab.sequence.regions", groups)
        adds = "it adds up numbers of all tokens, which no rank has a part of"
        rows = [
            ("all-gather in place of f, reduce-scatter in place of g", *regions),
            ("g in the loss", *(("3.3", adds) if world else ("tplab.tensor.mappings", groups))),
        ]
    elif world:
        f = "its sum is that of 11.3 where that multiplies" if is_async(settings) else ""
        rows = [("f", "3.2", f), ("g", "3.3", "")]
    else:
        rows = [("f and g", "tplab.tensor.mappings", groups)]
    rows += [("column-parallel layer", "4.1", product), ("row-parallel layer", "4.2", "")]
    if is_async(settings):
        rows.append(("product whose backward lets dx travel", "11.3", ""))
    elif settings.async_grad_allreduce:
        why = "the answer to 11.3 is an all-reduce, and here a reduce-scatter would have to travel"
        rows.append(("overlap in backward", "", why))
    bfloat16 = "in bfloat16 it gets logits in float32" if settings.precision == "bfloat16" else ""
    rows += [
        ("MLP", "5.2", "10.1 wants the last bias apart: it gets the output with the bias, and zeros"),
        ("heads and scores", "6.1", ""),
        ("attention", "6.2", "as for the MLP"),
        ("rows of a rank", "7.1", ""),
        ("lookup", "7.2", ""),
        ("embedding", "7.3", ""),
        ("logits", "7.4", product),
        ("maximum, log-sum-exp and target of the loss", "8.1 8.2 8.3 8.4", ""),
        ("loss", "8.5", bfloat16),
        ("layer", "10.1", ""),
        ("GPT", "10.2", ""),
    ]
    if cut:
        only_these = "10.2 adds up all positions: its table gets these alone"
        rows += [
            ("sum of the gradients of norms, biases and positions", "12.3", ""),
            ("positions of a rank's tokens", "tplab.tensor.sharding", only_these),
        ]
    several = "14.1 adds up after every backward, and here several may come before"
    rows += [
        ("length of the gradient", "14.4", ""),
        ("first weights", settings.start_from or "tplab.gpt.model", "the same for everybody's layers"),
        ("mean over replicas", "tplab.data.data_parallel", several),
        ("generation", "tplab.gpt.generation", "it draws from the distribution; 10.4 takes the best token"),
        ("checkpoints", "tplab.checkpoint.sharded", "they fit any number of ranks, with the state of the optimizer"),
    ]
    return [_row(*row, whose, idle) for row in rows]


def _row(what: str, source: str, why: str, whose: Mapping[str, str], idle: Collection[str]) -> dict[str, str]:
    """Return the row of a part that comes from exercises, such as "8.1 8.2", from a module of tplab, or from nobody."""
    exercises = source.split() or [""]
    first, last = exercises[0], exercises[-1]
    if first not in ANSWERS:
        return {"what": what, "whose": "tplab" if source else "nobody", "source": source, "why": why}
    owners = sorted({NOT_CALLED if exercise in idle else whose[exercise] for exercise in exercises})
    return {
        "what": what,
        "whose": owners[0] if len(owners) == 1 else f"in part {' and '.join(owners)}",
        "source": f"exercise {first}" if first == last else f"exercises {first} to {last}",
        "why": why or (DOES_WITHOUT if owners == [NOT_CALLED] else ""),
    }
