"""Chapter 10: the next token, and the one after it, from logits of which each rank has v/p.

To choose, nobody needs all logits. The k best of the whole vocabulary are among the k best of each rank, so p k
candidates travel, and every rank chooses among them:

    rank 0   best of ids 0 .. v/p - 1        (logit, id)  \\
    rank 1   best of ids v/p .. 2 v/p - 1    (logit, id)  -> all-gather -> the best of p, on every rank

With a cache each step computes one token. Its keys and values join those of the heads that the rank holds.
Traffic of one token of b texts: 2 L + 1 all-reduces of b h elements, all-gathers of 2 p b k.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from tplab.gpt.model import ParallelGPT
from tplab.tensor.mappings import all_gather


@torch.no_grad()
def generate(
    model: ParallelGPT,
    prompt: Tensor,
    max_new_tokens: int,
    *,
    prompt_lengths: Sequence[int] | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    stop_id: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """prompt [b, s] -> the texts with what follows, [b, s + max_new_tokens], the same on every rank.

    prompt_lengths    of each text, where they differ: what stands behind is written over
    temperature       0: always the best token (greedy); else draw from softmax(logits / temperature)
    top_k             draw from the k best only
    stop_id           behind this token a text is filled up with it; when all are, the result ends there
    generator         where rank 0 draws from, for all; None: torch's current state

    All ranks of the model's group call it with the same prompt. Dropout is off meanwhile.
    Raises ValueError for arguments that don't fit.
    """
    lengths = _check(prompt, max_new_tokens, prompt_lengths, temperature, top_k)
    b, s = prompt.shape
    start, stop = min(lengths), s + max_new_tokens
    known = torch.tensor(lengths, device=prompt.device)  # [b]
    text = torch.cat([prompt, prompt.new_zeros(b, max_new_tokens)], 1)  # [b, s + new]
    done = torch.zeros(b, dtype=torch.bool, device=prompt.device)
    was_training = model.training
    model.eval()
    try:
        cache = model.new_cache(b, stop)
        past = 0
        for place in range(start, stop):
            x = model.features(text[:, past:place], cache=cache)[:, -1]  # [b, h]
            token = choose(model, model.logits(x), temperature, top_k, generator)  # [b]
            if stop_id is not None:
                token = token.masked_fill(done, stop_id)
            token = torch.where(place < known, text[:, place], token)
            text[:, place] = token
            done |= (token == stop_id) & (place >= known) if stop_id is not None else done
            if done.all():
                return text[:, : place + 1]
            past = place
    finally:
        model.train(was_training)
    return text


def choose(
    model: ParallelGPT,
    logits: Tensor,
    temperature: float = 0.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """This rank's logits [b, v/p] -> the next token of each text [b], the same on every rank."""
    greedy = temperature == 0
    values, ids = candidates(model, logits, 1 if greedy else top_k)  # [b, k] each
    if greedy:
        return ids[:, 0]
    odds = (values.double() / temperature).softmax(-1)  # [b, k]
    token = ids.gather(1, torch.multinomial(odds, 1, generator=generator))[:, 0]  # [b]
    if model.world_size > 1:
        dist.broadcast(token, group=model.group, group_src=0)  # chance decides, so one rank decides for all
    return token


def candidates(model: ParallelGPT, logits: Tensor, k: int | None) -> tuple[Tensor, Tensor]:
    """The k best of the whole vocabulary (None: all of it): their logits [b, k], best first, and their ids [b, k].

    Of equal logits the lower id comes first.
    """
    width = logits.shape[-1]
    ids = torch.arange(model.rank * width, (model.rank + 1) * width, device=logits.device)  # [v/p]
    values = logits.masked_fill(ids >= model.config.vocab_size, -torch.inf)
    values, order = values.sort(dim=-1, descending=True, stable=True)
    kept = width if k is None else min(k, width)
    values, ids = values[:, :kept].contiguous(), ids[order[:, :kept]]  # [b, k] each
    if model.world_size > 1:
        values, ids = (torch.cat(all_gather(part, model.group), 1) for part in (values, ids))  # [b, p k] each
    values, order = values.sort(dim=-1, descending=True, stable=True)
    k = min(k or model.config.vocab_size, model.config.vocab_size)
    return values[:, :k], ids.gather(1, order[:, :k])


def _check(
    prompt: Tensor, max_new_tokens: int, lengths: Sequence[int] | None, temperature: float, top_k: int | None
) -> list[int]:
    if prompt.dim() != 2 or not prompt.numel() or prompt.is_floating_point():
        raise ValueError(f"prompt {list(prompt.shape)} {prompt.dtype} should be ids [b, s], with one token at least")
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens={max_new_tokens} should be 0 or more")
    if temperature < 0:
        raise ValueError(f"temperature={temperature} should be 0 (the best token) or more")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k={top_k} should be 1 or more, or None for the whole vocabulary")
    b, s = prompt.shape
    if lengths is None:
        return [s] * b
    if len(lengths) != b or not all(1 <= length <= s for length in lengths):
        raise ValueError(f"prompt_lengths {list(lengths)} should be {b} numbers from 1 to {s}, for prompts [{b}, {s}]")
    return [int(length) for length in lengths]
