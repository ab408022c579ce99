"""Text that the model generates: the prompt and its continuation."""

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
    """Return the prompt and `sample_tokens` random tokens, always the same for a given step. All ranks call this.

    The model has positions for `seq_length` tokens. If the prompt is longer, only its end is used, followed by one
    token (or by none, if there is only one position).
    """
    prompt = tokenizer.encode(settings.prompt).ids[-max(1, settings.seq_length - 1) :] or [0]
    more = min(settings.sample_tokens, settings.seq_length - len(prompt))
    ids = torch.tensor([prompt], device=ranks.device)  # [1, s]
    chance = torch.Generator(ranks.device).manual_seed(settings.seed + step)
    with lower_precision(settings, ranks):
        text = generate(for_generation(model), ids, more, temperature=TEMPERATURE, top_k=TOP_K, generator=chance)
    return tokenizer.decode(text[0].tolist())
