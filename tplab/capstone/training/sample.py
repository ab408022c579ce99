"""Text that the model writes: the prompt, and a continuation."""

import torch
from tokenizers import Tokenizer
from torch import nn

from tplab.capstone.settings.settings import Settings
from tplab.capstone.training.build_model import for_generation
from tplab.capstone.training.ranks import Ranks
from tplab.capstone.training.step import lower_precision
from tplab.gpt.generation import generate

TEMPERATURE, TOP_K = 0.8, 40


def write_sample(model: nn.Module, settings: Settings, tokenizer: Tokenizer, ranks: Ranks, step: int) -> str:
    """The prompt and `sample_tokens` tokens drawn at random, always the same for a step. Every rank calls this.

    The model has positions for `seq_length` tokens. Only the end of a longer prompt is used, with one token after it
    (or none, if there is only one position).
    """
    prompt = tokenizer.encode(settings.prompt).ids[-max(1, settings.seq_length - 1) :] or [0]
    more = min(settings.sample_tokens, settings.seq_length - len(prompt))
    ids = torch.tensor([prompt], device=ranks.device)  # [1, s]
    chance = torch.Generator(ranks.device).manual_seed(settings.seed + step)
    with lower_precision(settings, ranks):
        text = generate(for_generation(model), ids, more, temperature=TEMPERATURE, top_k=TOP_K, generator=chance)
    return tokenizer.decode(text[0].tolist())
