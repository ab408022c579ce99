"""The trial before training: on these ranks, the learner's model has to compute the same results as tplab's.

A small version of each model runs forward and backward in float64, and losses and gradients are compared. The checks
tested each answer separately, but here, some names that the answers use are bound to different functions. For example,
a layer that never calls `copy_to_region` may pass its check, but replacing f won't make it sequence-parallel.
"""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tplab.capstone.model import copy_shards
from tplab.capstone.settings.settings import Settings
from tplab.data.grad_norm import grad_norm
from tplab.gpt.model import ParallelGPT
from tplab.memory.config import GPTConfig
from tplab.runtime import device as own_device
from tplab.tensor.linear import Device

CLOSE = 1e-8  # relative to the largest element
NAMES = (
    "With sequence_parallel, copy_to_region and reduce_from_region are replaced by an all-gather and a reduce-scatter "
    "in chapters 4 to 7. Do your ColumnParallelLinear, RowParallelLinear, parallel_lookup and parallel_logits call "
    "them by these names?"
)
IN_BFLOAT16 = 0.05  # relative to the loss
TWO_DEVICES = ("Expected all tensors to be on the same device", "No backend type associated with device type")
Build = Callable[[GPTConfig, Device, torch.dtype | None], Any]


def try_out(build: Build, settings: Settings, mesh: DeviceMesh, device: Device) -> set[tuple[str, str]]:
    """Run a small model for one step. Return the code that ran, as (file, name of a function or class) pairs.

    If results differ from tplab's, raises a ValueError that names the worst one, with the same message on all ranks.
    """
    # On a GPU, backward runs in a different thread, but every answer is also called in forward
    ran: set[tuple[str, str]] = set()

    def look(frame: FrameType, event: str, arg: object) -> None:
        if event == "call":
            ran.add((frame.f_code.co_filename, frame.f_code.co_qualname.partition(".")[0]))

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        _take_a_step(build, settings, mesh, torch.device(device or own_device()))
    except (RuntimeError, ValueError) as error:
        if any(words in str(error) for words in TWO_DEVICES):
            error.add_note("Maybe your cell creates a tensor without device=, so that it's on the CPU.")
        raise
    finally:
        sys.setprofile(before)
    return ran


def _take_a_step(build: Build, settings: Settings, mesh: DeviceMesh, device: torch.device) -> None:
    group = mesh.get_group("tp")
    p = group.size()
    config = GPTConfig(
        num_layers=2, hidden_size=4 * p, num_heads=p, vocab_size=128 * p - 3, seq_length=2 * p, dropout=0.0
    )
    draws = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        right = ParallelGPT(config, group=group, device="cpu", dtype=torch.float64).to(device)
    theirs = build(config, device, torch.float64)
    with torch.no_grad():
        for parameter in right.parameters():
            parameter.add_(torch.randn((), dtype=torch.float64, generator=draws).item() / 8)  # some of them start at 0
    copy_shards(right, theirs)
    ids = torch.randint(config.vocab_size, (2, config.seq_length + 1), generator=draws).to(device)  # [b, s + 1]
    loss = right(ids[:, :-1], ids[:, 1:])
    loss.backward()
    try:
        their_loss = theirs(ids[:, :-1], ids[:, 1:])
        their_loss.backward()
    except RuntimeError as error:  # if shapes don't match, for example
        if settings.sequence_parallel:
            raise ValueError(f"a small GPT with your layers fails: {error}. {NAMES}") from error
        raise
    if theirs.hooks.finish_gradients:
        theirs.hooks.finish_gradients()

    own = dict(theirs.named_parameters())
    differences = {"the loss": _difference(their_loss.detach(), loss.detach())}
    for name, parameter in right.named_parameters():
        differences[f"the gradient of {name}"] = _difference(own[name].grad, parameter.grad)
    worst = torch.stack(list(differences.values()))  # [number of differences]
    dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=group)
    wrong = {name: value for name, value in zip(differences, worst.tolist(), strict=True) if value > CLOSE}
    if wrong:
        whole = {f"the gradient of {name}" for name, param in own.items() if not hasattr(param, "tensor_parallel")}
        raise ValueError(_message(wrong, settings, only_whole=wrong.keys() <= whole))

    norm, right_norm = theirs.hooks.norm(mesh).item(), grad_norm(right.parameters(), mesh).item()
    if not abs(norm - right_norm) <= CLOSE * right_norm:
        raise ValueError(
            f"for a small GPT, your gradient norm (14.4) is {norm / right_norm:.2f} times tplab's, {right_norm:.6f}. "
            "Does it count every parameter exactly once, and return the same value on every rank?"
        )
    if settings.precision == "bfloat16":
        _try_bfloat16(build(config, device, torch.float32), right, ids, loss.item())


def _try_bfloat16(theirs: nn.Module, right: nn.Module, ids: Tensor, wanted: float) -> None:
    """Check that bfloat16 matmuls with float32 weights give nearly the same loss, and finite gradients."""
    copy_shards(right, theirs)
    with torch.autocast(ids.device.type, torch.bfloat16):
        loss = theirs(ids[:, :-1], ids[:, 1:])
    loss.backward()
    if not abs(loss.item() - wanted) <= IN_BFLOAT16 * wanted:
        raise ValueError(
            f"a small GPT with your layers has a loss of {loss.item():.4f} in bfloat16, but {wanted:.4f} in float64. "
            "You can train without autocast by using --precision float32"
        )
    for name, parameter in theirs.named_parameters():
        if parameter.grad is None or not parameter.grad.isfinite().all():
            raise ValueError(f"in bfloat16, a small GPT with your layers gets a gradient of {name} that isn't finite")


def _difference(found: Tensor | None, right: Tensor | None) -> Tensor:
    """Return the largest difference on this rank, relative to the largest element (inf if missing or misshapen)."""
    assert right is not None
    if found is None or found.shape != right.shape:
        return torch.full((), torch.inf, dtype=torch.float64, device=right.device)
    return ((found - right).abs().max() / right.abs().max().clamp(min=1e-12)).nan_to_num(nan=torch.inf)


def _message(wrong: dict[str, float], settings: Settings, only_whole: bool) -> str:
    name = "the loss" if "the loss" in wrong else max(wrong, key=lambda name: wrong[name])
    if not settings.sequence_parallel:
        hint = "Do all of your exercises pass `tplab check`? You can train with tplab's layers by using --layers tplab."
    elif only_whole:
        hint = "Only norms, biases and positions are wrong, whose gradients 12.3 sums over the ranks' tokens."
    else:
        hint = NAMES
    return (
        "a small GPT with your layers computes something different than tplab's. In relative terms, "
        f"{name} differs by {wrong[name]:.1e}. {hint}"
    )
