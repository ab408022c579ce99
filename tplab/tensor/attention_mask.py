"""Chapter 06: which keys a query may attend to. There are t keys, and the s queries belong to the last s positions.

    causal, s = t = 4        with a cache: s = 2 new tokens, t = 5         keys 0 and 1 are padding
        x . . .                  x x x x .                                     . . x x
        x x . .                  x x x x x                                     . . x x
        x x x .                                                                . . x x
        x x x x                                                                . . x x

In the middle case, `is_causal=True` would make `scaled_dot_product_attention` use the wrong mask, because it aligns the
triangle with the top left corner, as if the new tokens were tokens 0 and 1. Each rank has all s queries and all t keys
of its own heads, so all ranks build the same mask.
"""

import torch
from torch import Tensor


def attention_mask(
    s: int,
    t: int,
    causal: bool,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
    device: torch.device,
    window: int | None = None,
) -> tuple[Tensor | None, bool]:
    """Return (`attn_mask`, `is_causal`) for `scaled_dot_product_attention`. `attn_mask` is None if it isn't needed.

    key_padding_mask    bool [b, t], True for padding, which no query attends to
    attn_mask           values added to the scores, [s, t] or [b, heads, s, t]; dimensions of size 1 are broadcast
    window              if causal, a query attends to its own key and the `window` - 1 keys before it; None: all
    The returned mask is either bool (True: may attend) or `attn_mask` with -inf at masked positions. It broadcasts
    to [b, heads, s, t].
    """
    may_look = None
    in_window = window is not None and t > window
    if in_window or (causal and s > 1 and not (s == t and key_padding_mask is None and attn_mask is None)):
        may_look = torch.ones(s, t, dtype=torch.bool, device=device).tril(t - s)  # [s, t]
    if may_look is not None and window is not None:
        may_look = may_look.triu(t - s - window + 1)
    if key_padding_mask is not None:
        no_padding = ~key_padding_mask[:, None, None, :]  # [b, 1, 1, t]
        may_look = no_padding if may_look is None else may_look & no_padding  # [b, 1, s, t]
    if attn_mask is None:
        return may_look, causal and may_look is None and s == t
    return (attn_mask if may_look is None else attn_mask.masked_fill(~may_look, float("-inf"))), False


def check_masks(
    b: int, s: int, t: int, num_heads: int, key_padding_mask: Tensor | None, attn_mask: Tensor | None
) -> None:
    """Raise ValueError for a mask with the wrong shape or dtype."""
    if key_padding_mask is not None and (key_padding_mask.dtype != torch.bool or key_padding_mask.shape != (b, t)):
        raise ValueError(
            f"key_padding_mask should be bool [{b}, {t}], True for padding, got {key_padding_mask.dtype} "
            f"{list(key_padding_mask.shape)}; t counts all keys, with those in the cache"
        )
    if attn_mask is None:
        return
    if not attn_mask.is_floating_point():
        raise ValueError(
            f"attn_mask is added to the scores, so it holds numbers (0 or -inf), got {attn_mask.dtype}: torch's own "
            "functions disagree on what True means. Write torch.zeros(s, t).masked_fill(hidden, -torch.inf)."
        )
    whole = (s, t) if attn_mask.dim() == 2 else (b, num_heads, s, t)
    fits = len(whole) == attn_mask.dim() and all(n in (1, w) for n, w in zip(attn_mask.shape, whole, strict=True))
    if not fits:
        raise ValueError(
            f"attn_mask {list(attn_mask.shape)} should be [{s}, {t}] or [{b}, {num_heads}, {s}, {t}], with 1 for what "
            "is the same for all; it has all heads, and each rank takes its own"
        )
