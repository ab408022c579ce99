"""Chapter 14: the norm of a gradient that is spread over many ranks.

Clipping needs the norm of the full gradient, that is, of all parameters' gradients in one vector. On a mesh, no rank
has the full gradient, and some parts of it exist on several ranks. Each element must be counted exactly once:

    sharded over tp                  every rank counts its shard
    replicated over tp               tp rank 0 counts it
    K, V heads on c ranks each       the first of the c counts them
    tied table, on two stages        the first stage counts it
    replicas (dp)                    they have the same gradients, so each one computes its norm separately
    shards of ZeRO, over dp          every rank counts its shard

    sum of squares here -> all-reduce over tp -> over pp (-> over dp) -> square root

Sharded parameters are marked as such (`tplab.tensor.sharding`). If replicated parameters were counted p times, the norm
would be too large and the steps too small. Without the all-reduce, each rank would clip by a different factor, and
replicas would drift apart. (Megatron: clip_grad_norm_fp32, param_is_not_tensor_parallel_duplicate.)
"""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tplab.common.taken_gradients import check_not_taken
from tplab.data.flat_parameters import Piece
from tplab.runtime import device
from tplab.tensor.sharding import group_ranks, shard_ranks, sharding_of


def grad_norm(
    parameters: Iterable[nn.Parameter], mesh: DeviceMesh | None = None, *, tied: nn.Parameter | None = None
) -> Tensor:
    """Return the 2-norm of the full model's gradient. It is the same on all ranks of a replica.

    parameters    this rank's parameters; those without a gradient count as 0
    mesh          a mesh from `tplab.data.grid.mesh`; None means that this process has the full model
    tied          the embedding table that the first and last stages share, as in `Pipeline`
    It all-reduces a single number over tp, and then over pp. Raises ValueError if a parameter is sharded over ranks
    other than the mesh's tp ranks, or if data parallelism has taken a gradient out of `.grad` and not returned it yet.
    """
    parameters = list(dict.fromkeys(parameters))
    check_not_taken(parameters, "compute the gradient's norm")
    check_mesh(parameters, mesh)
    own = [parameter for parameter in parameters if parameter.grad is not None]
    pieces = [Piece(p, p.shape, 0, p.grad.flatten()) for p in own if p.grad is not None]
    return _norm(pieces, mesh, ("tp", "pp"), tied)


def grad_norm_of_pieces(
    pieces: Iterable[Piece], mesh: DeviceMesh | None = None, *, tied: nn.Parameter | None = None
) -> Tensor:
    """Like `grad_norm`, but for gradients that ZeRO shards over dp (`zero.pieces()`). It also all-reduces over dp."""
    pieces = list(pieces)
    check_mesh((piece.parameter for piece in pieces), mesh)
    return _norm(pieces, mesh, ("tp", "pp", "dp"), tied)


def clip_grad_norm(
    parameters: Iterable[nn.Parameter],
    max_norm: float,
    mesh: DeviceMesh | None = None,
    *,
    tied: nn.Parameter | None = None,
) -> Tensor:
    """Scale gradients down so that their total norm is at most `max_norm`. Returns the norm before clipping.

    This corresponds to `torch.nn.utils.clip_grad_norm_` on a single process.
    """
    parameters = list(dict.fromkeys(parameters))
    norm = grad_norm(parameters, mesh, tied=tied)
    clip([parameter.grad for parameter in parameters if parameter.grad is not None], norm, max_norm)
    return norm


@torch.no_grad()
def clip(gradients: Iterable[Tensor], norm: Tensor, max_norm: float) -> None:
    """Multiply each gradient in place by min(1, max_norm / (norm + 1e-6)), as torch does."""
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for dtype, alike in _by_dtype(gradients).items():
        torch._foreach_mul_(alike, factor.to(dtype))  # one kernel for many tensors


def counted(parameter: nn.Parameter, shape: Sequence[int], tp_rank: int, tp_size: int) -> bool | Tensor:
    """Return whether this rank counts the parameter in the norm, or a mask that broadcasts to shape, if only a part."""
    sharding = sharding_of(parameter)
    if sharding is None:
        return tp_rank == 0
    here = [tp_rank % block.copies(tp_size) == 0 for block in sharding.blocks]
    if all(here) or not any(here):
        return all(here)
    lengths = [block.shard_length(tp_size) for block in sharding.blocks]
    wanted = [1] * len(shape)
    wanted[sharding.dim] = -1
    return torch.tensor(here).repeat_interleave(torch.tensor(lengths)).view(wanted)


@torch.no_grad()
def _norm(
    pieces: Sequence[Piece], mesh: DeviceMesh | None, dimensions: Sequence[str], tied: nn.Parameter | None
) -> Tensor:
    total = torch.zeros((), dtype=torch.float64, device=pieces[0].values.device if pieces else device())
    own: list[Tensor] = []
    others: list[Tensor] = []  # other ranks count these, but every rank must notice if they aren't finite
    (stage, _), tp = _place(mesh, "pp"), _place(mesh, "tp")
    for parameter, shape, start, values in pieces:
        if parameter is tied and stage > 0:
            others.append(values)
            continue
        here = counted(parameter, shape, *tp)
        if isinstance(here, Tensor):
            values = values[here.to(values.device).expand(shape).flatten()[start : start + len(values)]]
        (others if here is False else own).append(values)
    for dtype, alike in _by_dtype(own).items():
        lengths = torch._foreach_norm(alike, dtype=torch.promote_types(dtype, torch.float32))  # one kernel for many
        total += torch.stack(lengths).to(total).square().sum()
    for dtype, alike in _by_dtype(others).items():
        largest = torch._foreach_norm(alike, float("inf"), dtype=torch.promote_types(dtype, torch.float32))
        total += 0 * torch.stack(largest).to(total).sum()  # adds NaN unless all elements are finite
    for name in dimensions:
        if mesh is not None and _place(mesh, name)[1] > 1:
            dist.all_reduce(total, group=mesh.get_group(name))
    return total.sqrt()


def check_mesh(parameters: Iterable[nn.Parameter], mesh: DeviceMesh | None) -> None:
    """Raise ValueError if a parameter is sharded over ranks other than the tp ranks that the norm is summed over."""
    has_tp = mesh is not None and "tp" in (mesh.mesh_dim_names or ())
    given = group_ranks(mesh.get_group("tp")) if mesh is not None and has_tp else None
    for parameter in parameters:
        own = shard_ranks(parameter)
        if own is not None and len(own) > 1 and own != given:
            which = "there is no mesh" if mesh is None else f"the mesh's tp ranks are {list(given or ())}"
            raise ValueError(
                f"a parameter {list(parameter.shape)} is sharded over ranks {list(own)}, but {which}. Each rank would "
                "compute a different norm. Pass the mesh: mesh=tplab.data.mesh(dp=.., tp=..)"
            )


def _by_dtype(tensors: Iterable[Tensor]) -> dict[torch.dtype, list[Tensor]]:
    found: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        found.setdefault(tensor.dtype, []).append(tensor)
    return found


def _place(mesh: DeviceMesh | None, name: str) -> tuple[int, int]:
    """Return (index of this rank, size) in a dimension of the mesh, or (0, 1) if the mesh doesn't have it."""
    if mesh is None or name not in (mesh.mesh_dim_names or ()):
        return 0, 1
    return mesh.get_local_rank(name), mesh.size((mesh.mesh_dim_names or ()).index(name))
