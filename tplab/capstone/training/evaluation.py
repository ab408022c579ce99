"""What a run does between two steps: compute the loss on held-out text, and generate a sample."""

import torch
from tokenizers import Tokenizer

from tplab.capstone.data.prepare import Batches, TokenFiles
from tplab.capstone.settings.settings import Settings
from tplab.capstone.training.build_model import for_generation
from tplab.capstone.training.ranks import Ranks
from tplab.capstone.training.step import Step, lower_precision
from tplab.data.zero_state import unsharded
from tplab.gpt.generation import generate

TEMPERATURE, TOP_K = 0.8, 40


class Evaluation:
    """Evaluates the model on `evaluation_batches` batches of held-out text, which are split over the replicas."""

    def __init__(self, tokens: TokenFiles, settings: Settings, ranks: Ranks) -> None:
        self.settings, self.ranks = settings, ranks
        self.batches = Batches(tokens.validation, settings.seq_length, settings.batch_size, seed=0)

    def loss(self, step: Step, count: int | None = None) -> float:
        """Return the mean loss in nats per token, the same on every rank. All ranks have to call this.

        count    the number of batches; None: `evaluation_batches`
        """
        count = count or self.settings.evaluation_batches
        total = torch.zeros((), dtype=torch.float64, device=self.ranks.device)
        for number in range(count):
            own = self.batches.own(number, self.ranks.place.dp, self.settings.dp)  # [B/dp, s] each
            total += step.loss(*(tensor.to(self.ranks.device) for tensor in own)) / count
        return self.ranks.mean(total)


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
