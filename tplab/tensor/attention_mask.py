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
    s: int, t: int, causal: bool, key_padding_mask: Tensor | None, device: torch.device
) -> tuple[Tensor | None, bool]:
    """Return (`attn_mask`, `is_causal`) for `scaled_dot_product_attention`. `attn_mask` is None if it isn't needed.

    key_padding_mask    bool [b, t], True for padding, which no query attends to
    The returned mask is bool (True: may attend), and broadcasts to [b, heads, s, t].
    """
    may_look = None
    if causal and s > 1 and not (s == t and key_padding_mask is None):
        may_look = torch.ones(s, t, dtype=torch.bool, device=device).tril(t - s)  # [s, t]
    if key_padding_mask is not None:
        no_padding = ~key_padding_mask[:, None, None, :]  # [b, 1, 1, t]
        may_look = no_padding if may_look is None else may_look & no_padding  # [b, 1, s, t]
    return may_look, causal and may_look is None and s == t


def check_padding(b: int, t: int, key_padding_mask: Tensor) -> None:
    """Raise ValueError for a padding mask with the wrong shape or dtype."""
    if key_padding_mask.dtype != torch.bool or key_padding_mask.shape != (b, t):
        raise ValueError(
            f"key_padding_mask should be bool [{b}, {t}], True for padding, got {key_padding_mask.dtype} "
            f"{list(key_padding_mask.shape)}; t counts all keys, with those in the cache"
        )
