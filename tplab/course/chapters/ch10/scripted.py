"""A model without weights for the check of exercise 10.4: its logits depend on the whole text and on the "
"places in it.

So a token that was chosen wrongly, a place that is wrong, or a token that the cache lacks or holds twice, changes all
that follows. It notes how it is called.
"""

from typing import Any

import torch
from torch import Tensor

from tplab.collectives.by_hand import rank_and_size
from tplab.memory.config import GPTConfig
from tplab.runtime import device

CALLS = "the prompt is read once, then each new token once"
Script = tuple[int, int]  # seed, vocabulary

_PRIME = 2**31 - 1


def next_logits(seen: list[tuple[int, int]], script: Script) -> Tensor:
    """The logits [v] after the tokens that were seen, (place, token) each; the largest are negative, some are "
    "equal."""
    seed, vocab_size = script
    state = seed
    for place, token in seen:
        state = (state * 48271 + 1009 * place + token + 1) % _PRIME
    drawn = torch.randint(-9, -1, (vocab_size,), generator=torch.Generator().manual_seed(state))
    return drawn.double()


class Scripted:
    """Stands in for ParallelGPT: model(ids, cache=cache, past=past), model.new_cache, model.config, model.group."""

    def __init__(self, script: Script, group: Any) -> None:
        self.script, self.group = script, group
        self.rank, self.q = rank_and_size(group)
        self.config = GPTConfig(
            num_layers=1, hidden_size=4, num_heads=2, vocab_size=script[1], seq_length=64, dropout=0.0
        )
        self.caches: list[list] = []
        self.calls: list[tuple[int, int, bool]] = []  # tokens, past, with the cache
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
        out = torch.zeros(*ids.shape, width * self.q, dtype=torch.float64)  # the padding: zeros
        for line, (kept, tokens) in enumerate(zip(lines, ids.tolist(), strict=True)):
            for offset, token in enumerate(tokens):
                kept.append((past + offset, token))
                out[line, offset, : self.script[1]] = next_logits(kept, self.script)
        return out[..., self.rank * width : (self.rank + 1) * width].contiguous().to(device())

    def wrong_calls(self, length: int, new: int) -> str:
        """In words how it should not have been called; empty if all was right."""
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
            return f"{read} tokens were read, for a prompt of {length} and {new} new ones {length + new - 1} "
            "are enough"
        return "" if len(calls) == new else f"{len(calls)} calls for {new} new tokens"


def greedy(prompt: Tensor, new: int, script: Script, *, restart: bool = False) -> Tensor:
    """The texts that the scripted model writes, on one process. restart: places begin at 0 again in each call."""
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
    """What well-known mistakes write."""
    whole = greedy(prompt, new + 1, script)
    made = {
        "the new tokens alone, without their prompt": whole[:, prompt.shape[1] : -1],
        "the text with one token too many": whole,
    }
    if new:
        made["the text with one token too few"] = whole[:, :-2]
        made["what is written when the places begin at 0 again in each call"] = greedy(
            prompt, new, script, restart=True
        )
    return made
