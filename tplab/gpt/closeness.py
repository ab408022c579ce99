"""Chapter 10: how much the results of 1, 2 and 4 ranks differ.

    python -m tplab.gpt.closeness

The page chapters/how_close.md explains the two tables that this program prints.
"""

import torch
from torch import Tensor

from tplab.common import corpus
from tplab.gpt.model import ParallelGPT
from tplab.memory.config import GPTConfig
from tplab.runtime import device, launch
from tplab.tensor.mlp import ParallelMLP

RANKS = (1, 2, 4)
STEPS = (1, 10, 30, 100)
GPT = GPTConfig(num_layers=2, hidden_size=64, num_heads=4, vocab_size=256, seq_length=64, dropout=0.0)


def one_pass(values: torch.dtype, computed: torch.dtype) -> dict[str, Tensor]:
    """Run an MLP forward and backward, on values that are rounded to one dtype, and compute in another one.

    Returns the output and the gradient of the input, [64, 512] each.
    """
    torch.manual_seed(0)
    mlp = ParallelMLP(512, 2048)  # every number of ranks draws the same full weights
    x, upstream = torch.randn(2, 64, 512).to(values).to(device(), computed)
    mlp.to(values).to(device(), computed)
    x.requires_grad_()
    out = mlp(x)
    out.backward(upstream)
    return {"output": out.detach().double(), "dx": x.grad.double()}


def losses(dtype: torch.dtype) -> list[float]:
    """Train a small GPT, and return its loss at each step."""
    torch.manual_seed(0)
    model = ParallelGPT(GPT).to(device(), dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    seen = []
    for ids, targets in corpus.byte_batches(corpus.python_sources(300_000), 64, 16, max(STEPS), seed=1):
        loss = model(ids.to(device()), targets.to(device()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
    return seen


def apart(a: Tensor, b: Tensor) -> float:
    """Return the largest difference between two tensors, relative to the largest element."""
    return float((a - b).abs().max() / b.abs().max())


def table_of_passes() -> dict[torch.dtype, dict[str, list[float]]]:
    """Return, for each dtype and tensor, how far 1 rank is from the exact result, and 2 and 4 ranks from 1 rank."""
    found = {}
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        exact = launch(one_pass, 1, args=(dtype, torch.float64))[0]
        runs = {p: launch(one_pass, p, args=(dtype, dtype))[0] for p in RANKS}
        found[dtype] = {
            name: [apart(runs[1][name], exact[name]), *(apart(runs[p][name], runs[1][name]) for p in RANKS[1:])]
            for name in exact
        }
    return found


def table_of_losses() -> dict[torch.dtype, dict[int, list[float]]]:
    """Return, for each dtype and each of STEPS, how far the losses of 2 and 4 ranks are from those of 1 rank."""
    found = {}
    for dtype in (torch.float64, torch.float32):
        runs = {p: launch(losses, p, args=(dtype,), timeout=600)[0] for p in RANKS}
        found[dtype] = {step: [abs(runs[p][step - 1] - runs[1][step - 1]) for p in RANKS[1:]] for step in STEPS}
    return found


def main() -> None:
    print("an MLP             1 rank - exact   2 ranks - 1 rank   4 ranks - 1 rank   eps")
    for dtype, tensors in table_of_passes().items():
        for name, (alone, two, four) in tensors.items():
            eps = torch.finfo(dtype).eps
            print(f"{str(dtype)[6:]:9} {name:8} {alone:14.1e} {two:18.1e} {four:18.1e}   {eps:.1e}")
    print("\na GPT's loss       2 ranks - 1 rank   4 ranks - 1 rank")
    for dtype, steps in table_of_losses().items():
        for step, (two, four) in steps.items():
            print(f"{str(dtype)[6:]:9} step {step:<4} {two:15.1e} {four:18.1e}")


if __name__ == "__main__":
    main()
