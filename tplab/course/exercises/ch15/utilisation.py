"""The check for exercise 15.5, model FLOPs utilization, based on the operations that torch counts in a plain GPT."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode

from tplab import plain
from tplab.course import checks
from tplab.memory.config import GPTConfig

MODEL, HARDWARE = "model FLOPs", "hardware FLOPs"


def counted_flops(config: GPTConfig, again: bool, b: int = 2) -> float:
    """Return the FLOPs per token (forward and backward) that torch counts in a model of these sizes."""
    model = plain.GPT(config)
    ids = torch.arange(b * config.seq_length).view(b, -1) % config.vocab_size
    for layer in model.layers if again else ():
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    with FlopCounterMode(display=False) as counter, set_checkpoint_early_stop(False):
        model(ids, ids).backward()
    return counter.get_total_flops() / ids.numel()


@dataclass(frozen=True)
class Run:
    """A training run, with its model, its GPUs, and the speed that it reached."""

    config: GPTConfig
    gpus: int
    peak: float
    tokens_per_second: float
    again: bool

    def share(self, flops: float) -> float:
        return flops * self.tokens_per_second / (self.gpus * self.peak)


NO_SCORES = "the share without the scores of attention"
NO_LOGITS = "the share without the output layer"
LOOKUP = "the share that counts the look-up in the embedding as a product too"
FORWARD = "the share of the forward pass alone"
BACKWARD_ONCE = "the share with a backward pass that costs no more than the forward pass"
HALF = "half of the right one: a multiplication and an addition counted as one"
ONE_GPU = "the share of one GPU's peak, with the tokens of all GPUs"
TWICE_DIVIDED = "the share with the GPUs counted twice"
CAPPED = "1, which is less than the right number"
PERCENT = "a number of percent, not a part of 1"
WITH_RECOMPUTE = "the share that counts what is computed a second time"
WITHOUT_RECOMPUTE = "the share without what is computed a second time"
ALL_AGAIN = "the share that counts the output layer a second time too"
SHORT = "the share with half of the scores"
VISIBLE = "the share with those scores only that the mask leaves"


def lookalikes(run: Run) -> dict[str, dict[str, list[Tensor]]]:
    """Return the utilizations that common mistakes would produce."""
    c = run.config
    h, s, layers, v = c.hidden_size, c.seq_length, c.num_layers, c.vocab_size
    weights, scores, logits = 24.0 * layers * h * h, 4.0 * layers * s * h, 2.0 * h * v
    forward = weights + scores + logits
    again = (weights + scores) if run.again else 0.0
    shared = {
        NO_SCORES: 3 * (weights + logits),
        NO_LOGITS: 3 * (weights + scores),
        LOOKUP: 3 * (forward + logits),
        FORWARD: forward,
        BACKWARD_ONCE: 2 * forward,
        HALF: 1.5 * forward,
        SHORT: 3 * (weights + scores / 2 + logits),
        VISIBLE: 3 * (weights + scores * (s + 1) / (2 * s) + logits),
        ONE_GPU: 3 * forward * run.gpus,
        TWICE_DIVIDED: 3 * forward / run.gpus,
        PERCENT: 300 * forward,
    }
    of_model = shared | {WITH_RECOMPUTE: 3 * forward + again, f"{WITH_RECOMPUTE} ": 4 * forward}
    hardware = {
        NO_SCORES: 3 * (weights + logits) + (weights if run.again else 0),
        NO_LOGITS: 3 * (weights + scores) + again,
        WITHOUT_RECOMPUTE: 3 * forward,
        ALL_AGAIN: 4 * forward,
        ONE_GPU: (3 * forward + again) * run.gpus,
        TWICE_DIVIDED: (3 * forward + again) / run.gpus,
        PERCENT: 100 * (3 * forward + again),
    }
    right = {MODEL: 3 * forward, HARDWARE: 3 * forward + again}
    one = run.gpus * run.peak / run.tokens_per_second  # the FLOPs per token that would be a utilization of 1
    capped = {CAPPED: one} if one < right[MODEL] else {}
    of_model, hardware = capped | of_model, capped | hardware
    return {
        name: {label: [tensor(run.share(f))] for label, f in of.items() if abs(f / right[name] - 1) > 1e-9}
        for name, of in ((MODEL, of_model), (HARDWARE, hardware))
    }


def tensor(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def runs() -> list[Run]:
    draw = torch.rand(4, generator=checks.fresh_generator(), dtype=torch.float64).tolist()
    small = GPTConfig(num_layers=2, hidden_size=16, num_heads=2, vocab_size=24, seq_length=8)
    long = GPTConfig(num_layers=1, hidden_size=8, num_heads=1, vocab_size=40, seq_length=32)
    deep = GPTConfig(num_layers=3, hidden_size=24, num_heads=3, vocab_size=50, seq_length=10)
    return [
        Run(small, 1, 1e9 * (1 + draw[0]), 2000 * (1 + draw[1]), again=False),
        Run(long, 8, 1e9 * (1 + draw[1]), 9000 * (1 + draw[2]), again=False),
        Run(deep, 4, 1e9 * (1 + draw[2]), 5000 * (1 + draw[3]), again=True),
        Run(small, 2, 1e7 * (1 + draw[3]), 2000 * (1 + draw[0]), again=True),  # above 1, because the peak is too low
    ]


@checks.exercise("15.5", "How much of the machine was used")
def how_much_was_used(function: Callable[..., Any]) -> checks.Verdict:
    for run in runs():
        c = run.config
        sizes = f"{count(c.num_layers, 'layer')}, h = {c.hidden_size}, {c.seq_length} tokens, vocabulary {c.vocab_size}"
        call = f"utilisation(config, {run.tokens_per_second:.0f}, {run.gpus}, {run.peak:.3g}, layers_again={run.again})"
        with checks.calling(f"{call} with {sizes}", FORM):
            said = function(c, run.tokens_per_second, run.gpus, run.peak, layers_again=run.again)
        pair = list(said) if isinstance(said, (tuple, list)) else None
        if pair is None or len(pair) != 2 or not all(is_number(value) for value in pair):
            got = "None" if said is None else f"a {type(said).__name__}"
            checks.fail("15.5", f"{call} gave {got}, not two numbers.", FORM)
        right = {MODEL: run.share(counted_flops(c, False)), HARDWARE: run.share(counted_flops(c, run.again))}
        checks.verify(
            "15.5", 1, [{name: tensor(float(value)) for name, value in zip((MODEL, HARDWARE), pair, strict=True)}],
            [{name: tensor(value) for name, value in right.items()}], questions=QUESTIONS, lookalikes=lookalikes(run),
            note=f"parts of the peak, {sizes}, {count(run.gpus, 'GPU')}" + ", layers computed again" * run.again,
            alone=True,
        )  # fmt: skip
    return checks.Verdict("What torch counts in a plain GPT is what the formula says.")


def count(number: int, name: str) -> str:
    return f"{number} {name}" + ("" if number == 1 else "s")


def is_number(value: Any) -> bool:
    return (isinstance(value, (int, float)) and not isinstance(value, bool)) or (
        isinstance(value, Tensor) and value.numel() == 1
    )


def either(*kinds: str) -> Callable[[checks.Differences], bool]:
    return lambda d: checks.has_kind(MODEL, *kinds)(d) or checks.has_kind(HARDWARE, *kinds)(d)


FORM = "What comes out are two numbers, first the share of the model's FLOPs, then that of the hardware's."
QUESTIONS = (
    checks.Question(
        either(CAPPED),
        "Here the share is greater than 1, because the peak that was passed in is too low for this machine. A number "
        "above 1 shows the user that something is wrong. Which of your lines limits the result?",
    ),
    checks.Question(either(PERCENT), "These are percent. Which part of 1 are they?"),
    checks.Question(
        either(ONE_GPU),
        "`tokens_per_second` are those of all GPUs together. What could all of them compute in a second?",
    ),
    checks.Question(
        either(TWICE_DIVIDED), "The tokens are of all GPUs, and so should the peak be. How often do the GPUs count?"
    ),
    checks.Question(
        checks.has_kind(MODEL, WITH_RECOMPUTE, f"{WITH_RECOMPUTE} "),
        "What is computed a second time brings the model no further, so model FLOPs do not count it. Which of the two "
        "numbers does?",
    ),
    checks.Question(
        checks.has_kind(HARDWARE, WITHOUT_RECOMPUTE),
        "Here each layer runs a second time before its backward pass, and the hardware did that too. How often do the "
        "products of a layer's forward pass count?",
    ),
    checks.Question(
        checks.has_kind(HARDWARE, ALL_AGAIN),
        "Only the layers are computed again. Which product of the forward pass does not lie in a layer?",
    ),
    checks.Question(
        either(NO_SCORES), "Q Kᵀ and P V are products as well, though they have no weights. Where are they?"
    ),
    checks.Question(
        either(SHORT, VISIBLE),
        "For one token, with s keys: Q Kᵀ takes 2·s·h operations in a layer, and P V as many. Are both in your sum, or "
        "did you leave out what the mask hides? (A plain product computes that too, and MFU counts it.)",
    ),
    checks.Question(
        either(NO_LOGITS),
        "The output layer multiplies too, [h] times [h, v] for each token. Where is it in your sum?",
    ),
    checks.Question(
        either(LOOKUP),
        "The embedding copies a row of its table and multiplies nothing. How often is the table used in a product?",
    ),
    checks.Question(
        either(FORWARD),
        "That is the forward pass. The backward pass has two products where the forward pass has one.",
    ),
    checks.Question(
        either(BACKWARD_ONCE), "For Y = X A the backward pass needs dX and dA. How many products are they?"
    ),
    checks.Question(either(HALF), "A multiplication and an addition are two operations."),
    checks.Question(
        lambda d: MODEL not in d.names,
        "The model FLOPs are right. Which products does the hardware do once more with `layers_again`, and which does "
        "it not without?",
    ),
    checks.Question(
        lambda d: True,
        "Write the products of one token's forward pass one below the other: 24·h² with a layer's weights, 4·s·h with "
        "its scores, 2·h·v in the output layer. Three times that is a step. Which one differs from your sum?",
    ),
)
