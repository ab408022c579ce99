"""Rotary positions: `tplab.tensor.rotary`, by what they promise and against products of complex numbers."""

import pytest
import torch

from tests.reference import assert_close, random
from tplab.memory.config import RotaryScaling
from tplab.tensor.rotary import rotary_angles, rotate

HEADS, LENGTH, DIM = 3, 6, 8


def test_a_pair_is_number_i_with_number_i_plus_half_and_turns_as_a_complex_number():
    x = random((2, HEADS, LENGTH, DIM), "x")
    angles = random((LENGTH, DIM // 2), "angles")
    pairs = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(angles), angles)
    assert_close(rotate(x, angles), torch.cat([pairs.real, pairs.imag], -1))


def test_the_angles_are_position_times_base_to_the_minus_2i_over_d_in_float32_whatever_the_input():
    angles = rotary_angles(torch.tensor([0, 1, 5]), DIM, base=16.0)
    speeds = torch.tensor([1.0, 1 / 2, 1 / 4, 1 / 8])  # 16^(-2i/8)
    assert torch.equal(angles, torch.tensor([0.0, 1.0, 5.0])[:, None] * speeds)
    assert rotary_angles(torch.tensor([1]), 4)[0, 1] == torch.tensor(0.01)  # the base is 10000
    for dtype in (torch.float64, torch.bfloat16):
        assert rotate(random((2, HEADS, 3, DIM), "x", dtype=dtype), angles).dtype == dtype
    with pytest.raises(ValueError, match="head_dim=7 is odd"):
        rotary_angles(torch.arange(3), 7)


@pytest.mark.parametrize(
    ("head_dim", "base", "factor", "low", "high", "length"),
    [(128, 5e5, 8.0, 1.0, 4.0, 8192), (64, 5e5, 32.0, 1.0, 4.0, 8192), (8, 50.0, 3.0, 0.5, 1.5, 16)],
)
def test_llama_31_changes_low_frequencies_as_in_transformers(head_dim, base, factor, low, high, length):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {"rope_type": "llama3", "rope_theta": base, "factor": factor, "low_freq_factor": low}
    rope |= {"high_freq_factor": high, "original_max_position_embeddings": length}
    options = LlamaConfig(
        hidden_size=2 * head_dim, num_attention_heads=2, max_position_embeddings=16 * length, rope_parameters=rope
    )
    theirs, attention_factor = ROPE_INIT_FUNCTIONS["llama3"](options)
    scaling = RotaryScaling(factor=factor, low_freq_factor=low, high_freq_factor=high, original_seq_length=length)
    ours, plain = (rotary_angles(torch.tensor([1]), head_dim, base, s)[0] for s in (scaling, None))
    assert attention_factor == 1
    assert torch.equal(ours, theirs)
    assert ours[0] == plain[0]  # the highest frequency
    assert ours[-1] == plain[-1] / factor


def test_impossible_scalings_are_refused():
    for change in ({"factor": 0.5}, {"low_freq_factor": 4.0}, {"low_freq_factor": 0.0}, {"original_seq_length": 0}):
        given = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_seq_length": 8192}
        with pytest.raises(ValueError, match="factor should be at least 1"):
            RotaryScaling(**(given | change))
