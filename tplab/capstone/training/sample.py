"""Text that the model generates: the prompt and its continuation."""

import torch
from tokenizers import Tokenizer

from tplab.capstone.training.build_model import for_generation
from tplab.capstone.training.step import Step, lower_precision
from tplab.data.zero_state import unsharded
from tplab.gpt.generation import generate

TEMPERATURE, TOP_K = 0.8, 40


def write_sample(step: Step, tokenizer: Tokenizer, number: int) -> str:
    """Return the prompt and `sample_tokens` random tokens, the same for a given step `number`. All ranks call this.

    The model has positions for `seq_length` tokens. If the prompt is longer, only its end is used, followed by one
    token (or by none, if there is only one position).
    """
    settings, device = step.settings, step.ranks.device
    prompt = tokenizer.encode(settings.prompt).ids[-max(1, settings.seq_length - 1) :] or [0]
    more = min(settings.sample_tokens, settings.seq_length - len(prompt))
    ids = torch.tensor([prompt], device=device)  # [1, s]
    chance = torch.Generator(device).manual_seed(settings.seed + number)
    with lower_precision(settings, device), unsharded(step.training.optimizer):
        writer = for_generation(step.model, step.ranks.pp)
        text = generate(
            writer, ids, more, temperature=TEMPERATURE, top_k=TOP_K, generator=chance,
            vocab_size=tokenizer.get_vocab_size(),
        )  # fmt: skip
    return tokenizer.decode(text[0].tolist())
