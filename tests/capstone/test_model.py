"""`capstone.model`: weights are only copied between models with the same parameters."""

import pytest

from tests.capstone.a_few_steps import SMALL, make
from tplab import plain
from tplab.capstone.model import copy_shards


def test_models_of_other_names_or_shapes_are_refused():
    model, ours = plain.GPT(SMALL.model), make(SMALL)[0]
    with pytest.raises(ValueError, match=r"embedding.weight has the shape \[300, 32\], not \[384"):
        copy_shards(ours, model)
    ours = plain.GPT(SMALL.model)
    del model.final_norm
    with pytest.raises(ValueError, match=r"final_norm.weight has the shape None, not \[32\]"):
        copy_shards(ours, model)
