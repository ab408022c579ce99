"""Given by the course: my blocks, adapted to the way the transformer of chapter 10 calls them.

5.2, 6.2    My answers add their final bias themselves, but 10.3 wants to add it, so it gets zeros for the bias
6.2         My answer has no attention dropout, no padding mask, and no cross-attention
8.3         My answer computes in the dtype of the logits, so it gets them in float32 or wider
12.3        My answer has a shorter name
"""

import torch
from my_tp.attention import ParallelAttention as MyAttention
from my_tp.cross_entropy import vocab_parallel_loss
from my_tp.mlp import ParallelMLP as MyMLP
from my_tp.sequence import allreduce_sequence_gradients


def with_zeros(y):
    """y [.., h] -> y [.., h], zeros [h]"""
    return y, y.new_zeros(y.shape[-1])


class ParallelMLP(MyMLP):
    """x [.., h], replicated -> (y [.., h], replicated; zeros [h])"""

    def __init__(self, hidden_size, *, activation="gelu", skip_bias_add=True, group=None, device=None, dtype=None):
        if activation != "gelu" or not skip_bias_add:
            raise ValueError(
                f"5.2 has activation='gelu', not {activation!r}, and 10.3 calls it with skip_bias_add=True"
            )
        super().__init__(hidden_size, group=group, device=device, dtype=dtype)

    def forward(self, x):
        return with_zeros(super().forward(x))


class ParallelAttention(MyAttention):
    """x [b, s, h], replicated -> (y [b, s, h], replicated; zeros [h])"""

    def __init__(
        self, hidden_size, num_heads, *, causal=True, dropout=0.0, skip_bias_add=True, group=None, device=None,
        dtype=None,
    ):  # fmt: skip
        if dropout or not skip_bias_add:
            raise ValueError(
                f"6.2 has no dropout, so dropout={dropout} is too much, and 10.3 calls it with skip_bias_add=True"
            )
        super().__init__(hidden_size, num_heads, causal=causal, group=group, device=device, dtype=dtype)

    def forward(self, x, *, key_padding_mask=None, rng=None):
        if key_padding_mask is not None:
            raise ValueError("6.2 has no padding mask: pass texts of the same length")
        return with_zeros(super().forward(x))


def vocab_parallel_cross_entropy(logits, target, *, vocab_size, group=None, **options):
    """this rank's logits [.., v/p], target [..] -> the mean loss, in float32 or wider"""
    with torch.autocast(logits.device.type, enabled=False):
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return vocab_parallel_loss(logits, target, vocab_size=vocab_size, group=group, **options)


def allreduce_sequence_parallel_gradients(model, group=None):
    """Sum the gradients of norms, biases and positions over the ranks, because each rank saw only its own tokens."""
    if any(getattr(param, "sequence_parallel", False) for param in model.parameters()):
        allreduce_sequence_gradients(model, group)
