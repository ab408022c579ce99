"""A small GPT that is trained on a grid of ranks, and on one process by plain torch."""

import torch

from tests.data.small_net import weights_of
from tplab import device
from tplab.cluster.three_dimensions import Training3D
from tplab.data.grid import Grid
from tplab.gpt.model import ParallelGPT
from tplab.memory.config import GPTConfig
from tplab.tensor.rng import seed_all

CONFIG = GPTConfig(
    num_layers=4, hidden_size=8, num_heads=2, num_kv_heads=1, vocab_size=37, seq_length=6, dropout=0.0
)  # fmt: skip
SEED, STEPS, BATCH, MAX_NORM = 7, 4, 8, 0.5
DTYPE = torch.float64
OPTIONS = {"lr": 0.02, "weight_decay": 0.1}


def batch(step):
    """Whole: [8, 6] ids and targets, some of which don't count, more of them in the first half."""
    generator = torch.Generator().manual_seed(step)
    ids, targets = torch.randint(0, CONFIG.vocab_size, (2, BATCH, 6), generator=generator)
    targets[:3, :4] = -100
    targets[5, 2] = -100
    return ids, targets


def trained(grid, micro_batches, **options):
    size = BATCH // (grid.dp * micro_batches)
    training = Training3D(
        CONFIG, grid, torch.optim.AdamW, micro_batches=micro_batches, micro_batch_size=size, seed=SEED, dtype=DTYPE,
        **OPTIONS, **options,
    )  # fmt: skip
    losses, norms = [], []
    for step in range(STEPS):
        losses.append(training.step(*batch(step)))
        norms.append(float(training.norm))
    weights = weights_of(training.training.optimizer, training.stage)
    marks = {name: getattr(parameter, "tensor_parallel", None) for name, parameter in training.stage.named_parameters()}
    return losses, norms, {name: (weight, marks[name]) for name, weight in weights.items()}


def one_process(max_norm):
    """Losses, norms and weights of the unsharded model, with torch's own clipping."""
    seed_all(SEED)
    model = ParallelGPT(CONFIG, dtype=DTYPE, device=device())
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIONS)
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(*(part.to(device()) for part in batch(step)))
        loss.backward()
        losses.append(loss.item())
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm or torch.inf)))
        optimizer.step()
    whole = {name: parameter.detach() for name, parameter in model.named_parameters()}
    whole["embedding.weight"] = whole["embedding.weight"][: CONFIG.vocab_size]  # without the padding
    return losses, norms, whole


SEQUENCE_PARALLEL, CLIPPED = {"sequence_parallel": True}, {"max_norm": MAX_NORM}
CASES_8 = [
    (Grid(2, 2, 2), 4, {"zero": 1, **CLIPPED}),
    (Grid(2, 2, 2), 2, {"zero": 2, **CLIPPED, **SEQUENCE_PARALLEL}),
    (Grid(2, 2, 2), 2, {"zero": 3, **CLIPPED, **SEQUENCE_PARALLEL}),
]
