"""The check for exercise 10.4, the best token of a sharded vocabulary, and greedy generation with a cache.

`generate` is called with a model that has no weights. The logits of this model depend on every token so far and on each
token's position. So a wrong token, a wrong position, or a token that is missing from the cache or stored there twice
changes everything that follows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tplab.collectives.by_hand import rank_and_size
from tplab.course import checks
from tplab.memory.config import GPTConfig
from tplab.runtime import device, record

BATCH, WIDTH = 3, 320  # number of texts, and number of ids per rank
LITTLE = "only a few numbers for each token travel"
CALLS = "the prompt is read once, then each new token once"

FIRST, LAST = "the largest logit on rank 0", "the largest logit on the last rank"
RANDOM, EQUAL = "random logits", "equal logits"
NEGATIVE = "negative logits, and zeros in the padding"
ONE_RANK = "a vocabulary so small that rank 0 holds all of it"
BFLOAT16 = "logits in bfloat16"

OWN_ID = "this rank's own best, as an id of the whole vocabulary"
OWN_PLACE = "this rank's own best, as a place in its shard"
NO_OFFSET = "the right place, but in the shard: the ids of the ranks before are not counted"
WITH_PADDING = "the id of the largest logit, the padding included"
LARGEST_ID, SUM = "every rank's best id, the largest of them", "the sum of the ranks' choices"

NO_PROMPT = "the new tokens alone, without their prompt"
TOO_MANY, TOO_FEW = "the text with one token too many", "the text with one token too few"
FROM_ZERO = "what is written when the places begin at 0 again in each call"

Script = tuple[int, int]  # (seed, vocabulary size), which determines what the model generates


@dataclass(frozen=True)
class Choice(checks.Case):
    """One call to best_token."""

    scene: str

    def describe(self, name: str) -> str:
        return f"best_token, {self.scene}"


SCENES = (FIRST, LAST, RANDOM, EQUAL, NEGATIVE, ONE_RANK, BFLOAT16)
CHOICES = tuple(Choice(scene, groups=groups) for groups in (None, checks.GROUPS) for scene in SCENES)


def draw_logits(case: Choice, generator: torch.Generator, size: int) -> tuple[Tensor, int]:
    """Draw the logits [b, v] of all ranks, padding included, and return them with the true vocabulary size."""
    full = size * WIDTH
    logits = torch.randn(BATCH, full, generator=generator, dtype=torch.float64)
    if case.scene in (FIRST, LAST, BFLOAT16):
        for row, (first, last) in enumerate(((0, WIDTH - 1), (WIDTH // 2, WIDTH - 5), (7, 9))):
            logits[row, first if case.scene == FIRST else full - WIDTH + last] = 9.0
    if case.scene == BFLOAT16:
        return logits.to(torch.bfloat16), full
    if case.scene == EQUAL:
        logits = logits.clamp(max=4.0)
        logits[0, [3, WIDTH - 1, full - 1]] = 5.0
        logits[1, [full - WIDTH, full - 2]] = 5.0
        logits[2] = -1.0
    if case.scene == NEGATIVE:
        logits = -1e4 - logits.abs()  # lower than any value that an answer might use to mask logits
        logits[:, full - WIDTH // 2 :] = 0.0  # the padding
        return logits, full - WIDTH // 2
    if case.scene == ONE_RANK:
        logits = -1 - logits.abs()
        logits[:, WIDTH // 4 :] = 50.0
        return logits, WIDTH // 4
    return logits, full


def give_logits(case: Choice, problem: tuple[Tensor, int], place: checks.Place) -> tuple[Tensor, int]:
    return place.part(problem[0], -1).contiguous(), problem[1]


def run_best(best_token: Callable[..., Any], case: Choice, given: tuple[Tensor, int], group: Any) -> checks.Observed:
    logits, vocab_size = given[0].to(device()), given[1]
    snapshot = checks.Snapshot(logits=logits)
    with record() as section:
        ids = best_token(logits, vocab_size, group)
    numbers = sum(call.numel for call in checks.traffic(section))
    much = f"messages of {numbers} numbers for {BATCH} texts"
    limit = 4 * dist.get_world_size(group) * BATCH
    return {"ids": ids, LITTLE: checks.Claim(much if numbers > limit else ""), "inputs unchanged": snapshot.changed()}


def expect_ids(case: Choice, problem: tuple[Tensor, int], place: checks.Place) -> checks.Expected:
    logits, vocab_size = problem
    real = logits.masked_fill(torch.arange(logits.shape[-1]) >= vocab_size, -torch.inf)
    values, places = real.unflatten(-1, (place.size, WIDTH)).transpose(0, 1).max(-1)  # [p, b] each
    ids = places + WIDTH * torch.arange(place.size)[:, None]  # [p, b], the best id on each rank
    mistakes = {
        WITH_PADDING: logits.argmax(-1),
        "the highest of the ids with the largest logit": real.shape[-1] - 1 - real.flip(-1).argmax(-1),
    }
    if place.size > 1:
        mistakes |= {
            OWN_ID: ids[place.index],
            OWN_PLACE: places[place.index],
            NO_OFFSET: places.gather(0, values.argmax(0)[None])[0],
            LARGEST_ID: ids.amax(0),
            SUM: ids.sum(0),
        }
    return checks.Expected({"ids": logits[:, :vocab_size].argmax(-1)}, {"ids": mistakes})


_PRIME = 2**31 - 1


def next_logits(seen: list[tuple[int, int]], script: Script) -> Tensor:
    """Return the logits [v] that follow these (position, token) pairs. All logits are negative, and some are equal."""
    seed, vocab_size = script
    state = seed
    for place, token in seen:
        state = (state * 48271 + 1009 * place + token + 1) % _PRIME
    drawn = torch.randint(-9, -1, (vocab_size,), generator=torch.Generator().manual_seed(state))
    return drawn.double()


class Scripted:
    """A stand-in for ParallelGPT, with new_cache, config, and group. It records how it's called."""

    def __init__(self, script: Script, group: Any) -> None:
        self.script, self.group = script, group
        self.rank, self.q = rank_and_size(group)
        self.config = GPTConfig(
            num_layers=1, hidden_size=4, num_heads=2, vocab_size=script[1], seq_length=64, dropout=0.0
        )
        self.caches: list[list] = []
        self.calls: list[tuple[int, int, bool]] = []  # (tokens, past, whether the cache was passed)
        self.training = False

    def new_cache(self, batch_size: int, max_length: int) -> list:
        self.caches.append([[] for _ in range(batch_size)])
        self.calls.append((-1, max_length, True))
        return self.caches[-1]

    def eval(self) -> "Scripted":
        return self

    def train(self, mode: bool = True) -> "Scripted":
        return self

    def __call__(
        self, ids: Tensor, targets: Any = None, *, cache: Any = None, past: int = 0, rng: Any = None
    ) -> Tensor:
        self.calls.append((ids.shape[1], int(past), any(cache is mine for mine in self.caches)))
        lines: list = cache if isinstance(cache, list) and len(cache) == len(ids) else [[] for _ in ids]
        width = -(-self.script[1] // (8 * self.q)) * 8
        out = torch.zeros(*ids.shape, width * self.q, dtype=torch.float64)  # the padding stays 0
        for line, (kept, tokens) in enumerate(zip(lines, ids.tolist(), strict=True)):
            for offset, token in enumerate(tokens):
                kept.append((past + offset, token))
                out[line, offset, : self.script[1]] = next_logits(kept, self.script)
        return out[..., self.rank * width : (self.rank + 1) * width].contiguous().to(device())

    def wrong_calls(self, length: int, new: int) -> str:
        """Describe what is wrong with the recorded calls. Returns "" if nothing is wrong."""
        calls = [call for call in self.calls if call[0] >= 0]
        rooms = [call[1] for call in self.calls if call[0] < 0]
        if not new:
            return ""
        if not rooms or not all(with_cache for _, _, with_cache in calls):
            return "the model was called without the cache"
        if len(rooms) > 1:
            return f"{len(rooms)} caches were made"
        if rooms[0] < length + new - 1:
            return f"the cache has room for {rooms[0]} tokens, and {length + new - 1} are read"
        read = 0
        for tokens, past, _ in calls:
            if past != read:
                return f"{tokens} tokens were read with past={past}, when the cache held {read}"
            read += tokens
        if read != length + new - 1:
            return f"{read} tokens were read, for a prompt of {length} and {new} new ones {length + new - 1} are enough"
        return "" if len(calls) == new else f"{len(calls)} calls for {new} new tokens"


def greedy(prompt: Tensor, new: int, script: Script, *, restart: bool = False) -> Tensor:
    """Generate the texts [b, s + new] in a single process. With `restart`, positions start at 0 again in each call."""
    lines = []
    for tokens in prompt.tolist():
        seen = list(enumerate(tokens))
        text = list(tokens)
        for _ in range(new):
            text.append(int(next_logits(seen, script).argmax()))
            seen.append((0 if restart else len(text) - 1, text[-1]))
        lines.append(text)
    return torch.tensor(lines).view(len(prompt), -1)


def text_mistakes(prompt: Tensor, new: int, script: Script) -> dict[str, Tensor]:
    longer = greedy(prompt, new + 1, script)
    made = {NO_PROMPT: longer[:, prompt.shape[1] : -1], TOO_MANY: longer}
    if new:
        made |= {TOO_FEW: longer[:, :-2], FROM_ZERO: greedy(prompt, new, script, restart=True)}
    return made


@dataclass(frozen=True)
class Text(checks.Case):
    """One call to generate, with prompts [batch, length]."""

    batch: int
    length: int
    new: int

    def describe(self, name: str) -> str:
        return f"generate, prompt {[self.batch, self.length]}, {self.new} new tokens"


TEXTS = tuple(
    Text(*sizes, groups=groups) for groups in (None, checks.GROUPS) for sizes in ((1, 4, 5), (2, 1, 4), (2, 3, 0))
)


def draw_prompt(case: Text, generator: torch.Generator, size: int) -> tuple[Tensor, Script]:
    vocab_size = int(torch.randint(17, 23, (), generator=generator))
    prompt = torch.randint(vocab_size, (case.batch, case.length), generator=generator)
    return prompt, (int(torch.randint(10**6, (), generator=generator)), vocab_size)


def run_generate(generate: Callable[..., Any], case: Text, given: tuple[Tensor, Script], group: Any) -> checks.Observed:
    model, prompt = Scripted(given[1], group), given[0].to(device())
    snapshot = checks.Snapshot(prompt=prompt)
    with record() as section:
        text = generate(model, prompt, case.new)
    numbers = sum(call.numel for call in checks.traffic(section))
    much = f"messages of {numbers} numbers for {case.new} tokens of {case.batch} texts"
    limit = 4 * dist.get_world_size(group) * case.batch * max(case.new, 1)
    return {
        "text": text,
        CALLS: checks.Claim(model.wrong_calls(case.length, case.new)),
        LITTLE: checks.Claim(much if numbers > limit else ""),
        "inputs unchanged": snapshot.changed(),
    }


def expect_text(case: Text, problem: tuple[Tensor, Script], place: checks.Place) -> checks.Expected:
    prompt, script = problem
    return checks.Expected(
        {"text": greedy(prompt, case.new, script)}, {"text": text_mistakes(prompt, case.new, script)}
    )


@checks.exercise("10.4", "Greedy generation on p ranks")
def greedy_generation(best_token: Callable[..., Any], generate: Callable[..., Any]) -> checks.Verdict:
    for world_size in checks.WORLD_SIZES:  # check both functions at one world size, and then at the next
        checks.check_cases(
            "10.4", best_token, CHOICES, draw=draw_logits, give=give_logits, run=run_best, expect=expect_ids,
            questions=best_questions, crash=CRASH, whose_group=WHOSE_GROUP, world_sizes=[world_size],
        )  # fmt: skip
        checks.check_cases(
            "10.4", generate, TEXTS, draw=draw_prompt, run=run_generate, expect=expect_text,
            questions=GENERATE_QUESTIONS, crash=GENERATE_CRASH, stuck=GENERATE_STUCK, whose_group=WHOSE_GROUP,
            world_sizes=[world_size],
        )  # fmt: skip
    return checks.Verdict(
        "Each rank offers its best: a few numbers for each token travel, and all ranks write the same text."
    )


WHOSE_GROUP = (
    "Which collective, or which call for a rank or a size, was not given `group`, so that it works in the default "
    "group of all ranks? And does generate hand `model.group` on?"
)
GENERATE_STUCK = (
    "Do all ranks run the same number of steps? A rank that stops, or chooses, by itself leaves the others waiting."
)
CRASH = (
    "logits are this rank's [b, v/p]. Which shape and which dtype has each tensor that you send, and is it contiguous?"
)
GENERATE_CRASH = (
    "text grows by one column [b, 1] in each step, and the model gives logits [b, s, v/p] for the s tokens that it "
    "was given. Which of them is the next token chosen from?"
)
CHANGED = checks.Question(
    lambda d: "changed" in d.kinds(),
    "The logits and the prompt belong to the caller. `dist.all_reduce`, and functions of torch with a `_` at their "
    "end, write into the tensor they are given. Which of yours gets the caller's?",
)


SCENE_QUESTIONS = {
    EQUAL: "Several ids have the largest logit here, on one rank or on several. All ranks take the lowest of these "
    "ids. Which one do yours take, and do all take the same?",
    NEGATIVE: "All real logits are far below 0 here, and the padding holds zeros. What keeps the padding from being "
    "chosen? (The shard of a rank begins at its rank times its width.)",
    ONE_RANK: "Some ranks hold nothing but padding here. What do they offer, and can it win?",
    BFLOAT16: "The same logits in bfloat16, which has 8 bits for the digits of a number: 256 + 1 is 256 there. In "
    "which dtype do your ids travel?",
}
FORM_QUESTIONS = (
    CHANGED,
    checks.Question(
        checks.has_kind("ids", "none", "type", "structure", "dtype"),
        "The result is a tensor of ids [b], int64. What does yours return?",
    ),
    checks.Question(
        checks.has_kind("ids", "shape"),
        "The result has one id for each text, [b]. Which dimension is left over or missing?",
    ),
)
BEST_QUESTIONS = (
    checks.Question(
        checks.kind_is("ids", OWN_ID, OWN_PLACE),
        "Each rank has chosen for itself. Which of the ranks holds the largest logit of all, and how do the others "
        "learn of it?",
    ),
    checks.Question(
        checks.has_kind("ids", NO_OFFSET),
        "Place 3 in the shard of rank 1 is not id 3. Which id does the shard of a rank begin with?",
    ),
    checks.Question(
        checks.has_kind("ids", LARGEST_ID, SUM),
        "Only the ranks that hold the largest logit may offer an id. What do the others put in?",
    ),
    checks.Question(
        lambda d: LITTLE in d.names and "ids" not in d.names,
        "The right ids, but too much was sent for them. How many of a rank's logits can be the largest of all?",
    ),
    checks.Question(
        lambda d: True,
        "Every rank has one candidate: its largest logit and its id. By which rule does one of p win?",
    ),
)


def best_questions(case: Choice, observed: Sequence[checks.Observed]) -> tuple[checks.Question, ...]:
    ask = SCENE_QUESTIONS.get(case.scene)
    return *FORM_QUESTIONS, *([checks.Question(lambda d: "ids" in d.names, ask)] if ask else []), *BEST_QUESTIONS


GENERATE_QUESTIONS = (
    CHANGED,
    checks.Question(
        checks.has_kind("text", "none", "type", "structure"),
        "The result is a tensor of ids [b, s + max_new_tokens]. What does yours return?",
    ),
    checks.Question(checks.has_kind("text", NO_PROMPT), "The result is the whole text, with its prompt."),
    checks.Question(
        checks.has_kind("text", TOO_MANY, TOO_FEW),
        "How many tokens are wanted, and how many steps does your loop make?",
    ),
    checks.Question(
        checks.has_kind("text", FROM_ZERO),
        "`past` says at which place of the text the first of `ids` stands. What is it in the second call?",
    ),
    checks.Question(
        lambda d: LITTLE in d.names and d.names <= {LITTLE},
        "The right text, but too much was sent for it. Does `generate` use `best_token`, and what else does it send?",
    ),
    checks.Question(
        lambda d: CALLS in d.names,
        "Each token is read once: its keys and values are in the cache then, at the places past, past + 1, ... Which "
        "tokens do you hand to the model in the second step, with which `past`, and with which cache? And is the last "
        "new token read, though nobody asks for what follows it?",
    ),
    checks.Question(
        lambda d: True,
        "The next token is chosen from the logits of the last place. Which place do you take, and from which texts of "
        "the batch?",
    ),
)
