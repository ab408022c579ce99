"""Which exercises a GPT is built from, and whose code each part of it uses. No answer is run here.

    3.2 f, 3.3 g  ->  4.1, 4.2 linear layers  ->  5.2 MLP        ->  10.2, 10.3 layer  ->  10.4 GPT
                                              ->  6.2 attention  ->
                  ->  7.3 embedding, 7.4 logits                                  ->
                  ->  8.3 loss                                                   ->

With `sequence_parallel`, f becomes the all-gather of 12.2, and g its reduce-scatter, so the same answers now produce a
sequence-parallel model. The loss still uses g, because every rank needs the sums for all tokens there.
"""

from collections.abc import Collection, Mapping

from tplab.capstone.settings.settings import Settings
from tplab.course.notebooks.numbering import place

NOT_CALLED = "not called"


def whole_world(settings: Settings) -> bool:
    """Return True if all ranks share one model. Answers that don't take a group work only in this case."""
    return settings.dp == 1


def is_async(settings: Settings) -> bool:
    """Return True if the model uses 11.2's matmul. It all-reduces dx, which rules out sequence parallelism."""
    return settings.async_grad_allreduce and not settings.sequence_parallel


def needed(settings: Settings | None = None) -> list[str]:
    """Return the exercises whose answers a model with these settings needs, or if None, those for all settings."""
    parts = _parts(settings or Settings())
    sources = [source for has_it, _, source, _ in parts if has_it or settings is None]
    return sorted({exercise for source in sources if isinstance(source, list) for exercise in source}, key=place)


def check_answers(whose: Mapping[str, str], settings: Settings) -> None:
    """Raise ValueError if an answer is missing because `find_answers` was called with different settings."""
    if missing := [exercise for exercise in needed(settings) if exercise not in whose]:
        raise ValueError(
            f"a model with these settings also needs the answers to {', '.join(missing)}. Pass the same settings to "
            "find_answers"
        )


def used(whose: Mapping[str, str], settings: Settings, idle: Collection[str] = frozenset()) -> list[dict[str, str]]:
    """Return one row per part of a model: "what", "whose", "source" and "why". For `idle`, see `TrainingHooks`."""
    check_answers(whose, settings)
    rows = []
    for has_it, what, source, why in _parts(settings):
        if not has_it:
            continue
        if isinstance(source, list):
            owners = sorted({NOT_CALLED if exercise in idle else whose[exercise] for exercise in source})
            owner = owners[0] if len(owners) == 1 else f"partly {' and partly '.join(owners)}"
            why = why or ("the other answers don't call it" if owners == [NOT_CALLED] else "")
            source = f"exercise {source[0]}" if len(source) == 1 else f"exercises {source[0]} to {source[-1]}"
        else:
            owner = "tplab" if source else "left out"
        rows.append({"what": what, "whose": owner, "source": source, "why": why})
    return rows


def _parts(settings: Settings) -> list[tuple[bool, str, str | list[str], str]]:
    """Return one row per part: whether the model has it, what it is, its exercises or its tplab module, and why."""
    world, cut, overlap = whole_world(settings), settings.sequence_parallel, is_async(settings)
    groups = f"the answer works on all ranks, but here each of dp={settings.dp} groups of {settings.tp} has a model"
    matmul = "uses the matmul of 11.2" if overlap else ""
    adds = "adds up values of all tokens, which are the same on every rank"
    return [
        (world and not cut, "f", ["3.2"], "11.2 does its all-reduce in some of the matmuls" if overlap else ""),
        (world and not cut, "g", ["3.3"], ""),
        (not world and not cut, "f and g", "tplab.tensor.operators", groups),
        (world and cut, "all-gather instead of f, reduce-scatter instead of g", ["12.2"], ""),
        (world and cut, "g in the loss", ["3.3"], adds),
        (not world and cut, "all-gather and reduce-scatter instead of f and g", "tplab.sequence.regions", groups),
        (not world and cut, "g in the loss", "tplab.tensor.operators", groups),
        (True, "column-parallel layer", ["4.1"], matmul),
        (True, "row-parallel layer", ["4.2"], ""),
        (overlap, "matmul that overlaps with the all-reduce of dx", ["11.2"], ""),
        (
            settings.async_grad_allreduce and not overlap, "overlap in backward", "",
            "11.2 all-reduces dx, but sequence parallelism needs a reduce-scatter",
        ),
        (True, "MLP", ["5.2"], "10.3 wants the final bias separately"),
        (True, "attention", ["6.2"], "the same as for the MLP"),
        (True, "lookup", ["7.2"], ""),
        (True, "embedding", ["7.3"], ""),
        (True, "logits", ["7.4"], matmul),
        (True, "log-sum-exp, and loss of a token", ["8.1", "8.2"], ""),
        (True, "loss", ["8.3"], "gets float32 logits in bfloat16" if settings.precision == "bfloat16" else ""),
        (True, "bias, dropout and residual", ["10.2"], ""),
        (True, "layer", ["10.3"], ""),
        (True, "GPT", ["10.4"], ""),
        (cut, "sum of the gradients of norms, biases and positions", ["12.3"], ""),
        (cut, "positions of a rank's tokens", "tplab.tensor.sharding", "10.4 would add the positions of all tokens"),
        (True, "gradient norm", ["14.4"], ""),
        (True, "initial weights", settings.start_from or "tplab.gpt.model", "the same for all kinds of layers"),
        (True, "average over replicas", "tplab.data.data_parallel", "14.1 averages after every backward pass"),
        (True, "generation", "tplab.gpt.generation", "draws tokens at random; 10.5 takes the most likely one"),
        (True, "checkpoints", "tplab.checkpoint.sharded", "work on any number of ranks, and include the optimizer"),
    ]  # fmt: skip
