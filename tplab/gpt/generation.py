"""Chapter 10: text generation, token by token, from logits that are sharded over the vocabulary.

Choosing a token doesn't require all logits. The k best tokens of the full vocabulary are among the k best of each rank,
so the ranks exchange p k candidates, and each rank chooses from those:

    rank 0   best of ids 0 .. v/p - 1        (logit, id)  \\
    rank 1   best of ids v/p .. 2 v/p - 1    (logit, id)  -> all-gather -> the best of p, on every rank

With a KV cache, each step computes a single token and appends its keys and values to those of the rank's heads. The
traffic per token for b texts is 2 L + 1 all-reduces of b h elements and two all-gathers of b p k elements, followed by
a broadcast of b ids if tokens are sampled.
"""

import math

import torch
import torch.distributed as dist
from torch import Tensor

from tplab.gpt.model import ParallelGPT
from tplab.tensor.operators import all_gather


@torch.no_grad()
def generate(
    model: ParallelGPT,
    prompt: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    stop_id: int | None = None,
    vocab_size: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Continue the prompts [b, s]. Returns the texts [b, s + max_new_tokens], the same on every rank.

    temperature       0: always the best token (greedy); otherwise, sample from softmax(logits / temperature)
    top_k             sample only from the k best tokens
    stop_id           after a text's first generated stop_id, fill the text up with it; return early once all have one
    vocab_size        choose only ids below it, for a tokenizer that has fewer tokens than the model
    generator         the generator that rank 0 samples with on behalf of all ranks; None: torch's default

    All ranks of the model's group must call it with the same prompt. Dropout is disabled during generation. Raises
    ValueError for invalid arguments.
    """
    _check(prompt, max_new_tokens, temperature, top_k)
    b, s = prompt.shape
    text = new = prompt  # `new`: tokens whose keys and values aren't in the cache yet
    done = torch.zeros(b, dtype=torch.bool, device=prompt.device)
    was_training = model.training
    model.eval()
    try:
        cache = model.new_cache(b, s + max_new_tokens)
        for _ in range(max_new_tokens):
            x = model.features(new, cache=cache)[:, -1]  # [b, h]
            token = _choose(model, model.logits(x), temperature, top_k, vocab_size, generator)  # [b]
            if stop_id is not None:
                token = token.masked_fill(done, stop_id)
                done |= token == stop_id
            new = token[:, None]
            text = torch.cat([text, new], 1)
            if stop_id is not None and done.all():
                break
    finally:
        model.train(was_training)
    return text


def _choose(
    model: ParallelGPT, logits: Tensor, temperature: float, top_k: int | None, vocab_size: int | None,
    generator: torch.Generator | None,
) -> Tensor:  # fmt: skip
    """Return the next token of each text [b], the same on every rank, given this rank's logits [b, v/p]."""
    greedy = temperature == 0
    values, ids = candidates(model, logits, 1 if greedy else top_k, vocab_size)  # [b, k] each
    if greedy:
        return ids[:, 0]
    values = values.double()
    # the largest value is subtracted first, because dividing it by a temperature such as 1e-310 would overflow
    odds = ((values - values[:, :1]) / temperature).softmax(-1)  # [b, k]
    token = ids.gather(1, torch.multinomial(odds, 1, generator=generator))[:, 0]  # [b]
    if model.world_size > 1:
        dist.broadcast(token, group=model.group, group_src=0)  # sampling is random, so one rank decides for all
    return token


def candidates(
    model: ParallelGPT, logits: Tensor, k: int | None, vocab_size: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return the logits [b, k], best first, and ids [b, k] of the k best tokens in the full vocabulary (k=None: all).

    Only ids below `vocab_size` are candidates (None: the model's vocab_size). If logits are equal, the lower id wins.
    """
    vocab_size = min(vocab_size or model.config.vocab_size, model.config.vocab_size)
    width = logits.shape[-1]
    ids = torch.arange(model.rank * width, (model.rank + 1) * width, device=logits.device)  # [v/p]
    values = logits.masked_fill(ids >= vocab_size, -torch.inf)
    values, order = values.sort(dim=-1, descending=True, stable=True)
    kept = width if k is None else min(k, width)
    values, ids = values[:, :kept].contiguous(), ids[order[:, :kept]]  # [b, k] each
    if model.world_size > 1:
        values, ids = (torch.cat(all_gather(part, model.group), 1) for part in (values, ids))  # [b, p k] each
    values, order = values.sort(dim=-1, descending=True, stable=True)
    k = min(k or vocab_size, vocab_size)
    return values[:, :k], ids.gather(1, order[:, :k])


def _check(prompt: Tensor, max_new_tokens: int, temperature: float, top_k: int | None) -> None:
    if prompt.dim() != 2 or not prompt.numel() or prompt.is_floating_point():
        raise ValueError(f"prompt {list(prompt.shape)} {prompt.dtype} should be ids [b, s], with one token at least")
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens={max_new_tokens} should be 0 or more")
    if not 0 <= temperature < math.inf:  # NaN isn't, either
        raise ValueError(f"temperature={temperature} should be 0 (the best token) or a larger, finite number")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k={top_k} should be 1 or more, or None for the whole vocabulary")
