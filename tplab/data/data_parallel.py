"""Chapter 14: data parallelism: every rank has the full model and trains it on different sequences.

    rank 0   x_0 -> forward -> backward -> dW_0 -+                 +-> optimizer: W
    rank 1   x_1 -> forward -> backward -> dW_1 -+- all-reduce / p +-> optimizer: W, the same

If the ranks start with equal weights and use equal gradients, their weights stay equal, so this is all we need. The
remaining problem is waiting. Backward computes the gradients from the last layer to the first. We put them into buckets
in that order and send each bucket as soon as it is full, while backward continues:

    compute      [ backward of layer 3 ][ of layer 2 ][ of layer 1 ]
    network                            [ bucket 0: 3 ][ bucket 1: 2 ][ bucket 2: 1 ]  finish()

We use buckets because one message per bias would be dominated by latency, and a single message couldn't be sent before
the end of backward. Buckets are sent in a fixed order, no matter which one is full first. Otherwise, two ranks might
sum different buckets.

Averaging each rank's mean loss gives the mean over all tokens only if every rank has the same number of tokens. If some
ranks have fewer, because of padding or targets of -100, divide the sum of the losses by the number of tokens on all
ranks, and sum the gradients:

    data = DataParallel(model, average=False)
    loss = F.cross_entropy(logits, target, reduction="sum") / tokens_of_all(count)

Each step all-reduces Ψ elements, one per parameter of the model, so each rank of a ring sends 2(p-1)/p Ψ elements.
(Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training"; torch:
DistributedDataParallel.)
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from tplab.collectives.by_hand import rank_and_size
from tplab.common.taken_gradients import check_not_taken, clear_taken, mark_taken, own_gradients
from tplab.data.flat_parameters import BUCKET_BYTES, broadcast, in_buckets, start_alike
from tplab.runtime import device


def tokens_of_all(count: int, group: ProcessGroup | None = None) -> int:
    """Return the total number of tokens on all ranks, given this rank's `count`. It all-reduces a single number."""
    if rank_and_size(group)[1] == 1:
        return count
    total = torch.tensor(count, device=device())
    dist.all_reduce(total, group=group)
    return int(total)


class DataParallel:
    """Reduces the gradients of a replicated model. It doesn't wrap the model, so you call the model as usual.

        data = DataParallel(model)
        loss.backward()             # sends full buckets
        data.finish()               # sends the rest and waits for all buckets
        optimizer.step()

    bucket_bytes    the maximum bucket size, as in `in_buckets`. Smaller buckets are sent earlier but need more calls
                    (DDP's `bucket_cap_mb`)
    average         whether to average the gradients over the ranks. If False, they are summed. Then zero them before
                    each step, because otherwise the result of an earlier `finish` is summed again
    group           the ranks that have the same part of the model, and no others

    A parameter that no rank used in a step gets a gradient of zero, so an optimizer's momentum and weight decay still
    change it. To freeze it, use `requires_grad_(False)`.

    The constructor copies rank 0's parameters and buffers to all ranks. `buckets` is a list of lists of parameters, and
    `started` counts the buckets sent since the last `finish`. After a bucket is sent, its gradients are None until
    `finish`, so that nothing can use unreduced gradients.

    Raises ValueError if the group's ranks aren't replicas (see `start_alike`), or if another backward or an optimizer
    step runs before `finish`.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        average: bool = True,
        group: ProcessGroup | None = None,
    ) -> None:
        self.group, self.world_size = group, rank_and_size(group)[1]
        self.average = average
        start_alike(model.named_parameters(), group)
        broadcast(model.buffers(), group)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        own_gradients(trained, "DataParallel")
        self._frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
        self.buckets = in_buckets(model.parameters(), bucket_bytes)
        self._names = {parameter: name for name, parameter in model.named_parameters()}
        self._place = {parameter: number for number, bucket in enumerate(self.buckets) for parameter in bucket}
        self._arrived: set[nn.Parameter] = set()
        self._travelling: list[tuple[Tensor, dist.Work | None]] = []
        self._sync = True
        for parameter in self._place:
            parameter.register_post_accumulate_grad_hook(self._gradient_is_there)
        weakref.finalize(self, register_optimizer_step_pre_hook(_check_finished).remove)

    @property
    def started(self) -> int:
        return len(self._travelling)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context manager in which backward only accumulates gradients. The next backward, or `finish`, sends them."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def finish(self) -> None:
        """Wait for all buckets and put the reduced gradients into `.grad`. Call it on every rank once per step.

        Raises ValueError if a parameter that was frozen at first has been unfrozen, because it isn't in any bucket.
        """
        if thawed := [list(parameter.shape) for parameter in self._frozen if parameter.requires_grad]:
            raise ValueError(
                f"{len(thawed)} parameters were frozen when DataParallel was made, and aren't any more: {thawed[:3]}. "
                "Their gradients would differ between the replicas. Unfreeze them first, on a new model"
            )
        while self.started < len(self.buckets):
            self._start(self.buckets[self.started])
        for bucket, (vector, work) in zip(self.buckets, self._travelling, strict=True):
            if work is not None:
                work.wait()
            numbers = vector.split([parameter.numel() for parameter in bucket])
            for parameter, gradient in zip(bucket, numbers, strict=True):
                if parameter.requires_grad:  # it may have been frozen in the meantime
                    parameter.grad = gradient.view_as(parameter)
            clear_taken(bucket)
        self._arrived, self._travelling = set(), []

    def abandon(self) -> None:
        """Discard the gradients of an unfinished step, for example after an error in the backward pass."""
        for bucket in self.buckets:
            clear_taken(bucket)
            for parameter in bucket:
                parameter.grad = None
        self._arrived, self._travelling = set(), []

    def _gradient_is_there(self, parameter: nn.Parameter) -> None:
        """Send all complete buckets. Backward calls this hook for each parameter whose gradient is complete."""
        if not self._sync:
            return
        if self._place[parameter] < self.started:
            raise ValueError(
                f"{self._names[parameter]} got a second gradient before finish(): its bucket has left. Let all "
                "backwards but the last one of a step run inside no_sync()"
            )
        self._arrived.add(parameter)
        while self.started < len(self.buckets) and self._arrived.issuperset(self.buckets[self.started]):
            self._start(self.buckets[self.started])

    def _start(self, bucket: list[nn.Parameter]) -> None:
        """Send a bucket as one vector of gradients, with zeros for parameters that have no gradient on this rank."""
        gradients = []
        for parameter in bucket:
            gradients.append(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
            parameter.grad = None
        mark_taken(bucket, "DataParallel is still summing it over the replicas: call its finish() first")
        vector = torch.cat([gradient.detach().flatten() for gradient in gradients])
        if self.average:
            vector /= self.world_size
        work = None if self.world_size == 1 else dist.all_reduce(vector, group=self.group, async_op=True)
        self._travelling.append((vector, work))


def _check_finished(optimizer: Optimizer, *_: Any) -> None:
    """Raise ValueError if an optimizer is about to skip parameters because their buckets are still being reduced."""
    for group in optimizer.param_groups:
        check_not_taken(group["params"], "update the weights")
