"""Text that pipeline stages generate together is Hugging Face's, and that of one process where tokens are drawn."""

import pytest
import torch

from tests.gpt.test_generation import NEW, VOCAB, given, hugging_face, prompt
from tests.gpt.test_model import make
from tplab import launch
from tplab.data.grid import mesh
from tplab.gpt.generation import generate
from tplab.pipeline.generation import PipelinedGPT
from tplab.pipeline.stages import gpt_stages
from tplab.sequence.gpt import SequenceParallelGPT


def _texts(models):
    grid = mesh(pp=2, tp=2)
    found = []
    for state, config in models:
        stage = gpt_stages(make(state, config, group=grid.get_group("tp")), 2)[grid.get_local_rank("pp")]
        writer = PipelinedGPT(stage, grid.get_group("pp"))
        drawn = generate(
            writer, prompt(), NEW, temperature=0.8, top_k=20, generator=torch.Generator().manual_seed(5)
        )  # fmt: skip
        found.append((generate(writer, prompt(), NEW), drawn))
    return found


def test_stages_generate_the_text_of_the_whole_model():
    models = [given(kind) for kind in ("gpt2", "llama")]
    for on_rank in launch(_texts, 4, args=(models,), timeout=120):
        for kind, (state, config), (greedy, drawn) in zip(("gpt2", "llama"), models, on_rank, strict=True):
            theirs = hugging_face(kind)[0].generate(
                prompt(), attention_mask=torch.ones_like(prompt()), max_new_tokens=NEW, do_sample=False, pad_token_id=0
            )
            assert torch.equal(greedy, theirs)
            alone = generate(
                make(state, config), prompt(), NEW, temperature=0.8, top_k=20,
                generator=torch.Generator().manual_seed(5),
            )  # fmt: skip
            assert torch.equal(drawn, alone)
            assert not torch.equal(drawn, greedy)
            assert int(drawn.max()) < VOCAB


def test_a_sequence_parallel_stage_is_refused():
    state, config = given("gpt2")
    del state
    stages = gpt_stages(SequenceParallelGPT(config), 2)
    with pytest.raises(ValueError, match="the next token of a text can't be split"):
        PipelinedGPT(stages[0], None)
