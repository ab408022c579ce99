"""Chapter 14: data parallelism: every rank has the whole model, and takes its own sequences.

    rank 0   x_0 -> forward -> backward -> dW_0 -+                 +-> optimizer: W
    rank 1   x_1 -> forward -> backward -> dW_1 -+- all-reduce / p +-> optimizer: W, the same

Equal weights and equal gradients give equal weights again, so that is all there is to it. What is left is not to wait.
Backward makes the gradients from the last layer to the first. They are put into buckets in that order, and a full
bucket leaves at once, while backward goes on:

    compute      [ backward of layer 3 ][ of layer 2 ][ of layer 1 ]
    network                            [ bucket 0: 3 ][ bucket 1: 2 ][ bucket 2: 1 ]  finish()

Buckets, since a message for each bias would be all latency, and one for all gradients could not leave before the end.
They leave in a fixed order, whatever happens to be full first, or two ranks might add up different buckets.

The mean over ranks of means over tokens is the mean over all tokens only if each rank has as many. Where it may have
fewer (padding, -100), take the sum of the losses, divide by the tokens of all ranks, and add the gradients up:

    data = DataParallel(model, average=False)
    loss = F.cross_entropy(logits, target, reduction="sum") / tokens_of_all(count)

A step sends Ψ numbers through one all-reduce, 2(p-1)/p Ψ from each rank on a ring.
(Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training"; torch:
DistributedDataParallel.)
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from tplab.collectives.by_hand import rank_and_size
from tplab.data.flat_parameters import BUCKET_BYTES, broadcast, in_buckets
from tplab.runtime import device


def tokens_of_all(count: int, group: ProcessGroup | None = None) -> int:
    """How many tokens all ranks have together, of which this one has `count`: one all-reduce of one number."""
    if rank_and_size(group)[1] == 1:
        return count
    total = torch.tensor(count, device=device())
    dist.all_reduce(total, group=group)
    return int(total)


class DataParallel:
    """Reduces the gradients of a model over the ranks, beside it: the model is called as ever.

        data = DataParallel(model)
        loss.backward()             # full buckets leave
        data.finish()               # the rest leaves, and all have come
        optimizer.step()

    bucket_bytes    as in `in_buckets`: smaller buckets leave earlier but cost more calls (DDP's `bucket_cap_mb`)
    average         the mean over the ranks; False: the sum (then zero the gradients before each step: what an earlier
                    `finish` left there would be added up once more)
    reduce_dtype    add up in this dtype; None: the gradients' own. For bfloat16 models, whose sum over many ranks loses
                    digits that float32 keeps (Megatron's `grad_reduce_in_fp32`)
    group           the ranks with the same part of the model: the others must not be in it

    A parameter that no rank used in a step gets a gradient of zero, so an optimizer's momentum and weight decay still
    move it; `requires_grad_(False)` keeps it still.

    The constructor gives all ranks the parameters and buffers of rank 0. `buckets` are lists of parameters; `started`
    says how many of them have left since the last `finish`. From then on until `finish` their gradients are None, so
    that nobody takes one that is not reduced yet. One more backward before `finish` raises ValueError.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        average: bool = True,
        reduce_dtype: torch.dtype | None = None,
        group: ProcessGroup | None = None,
    ) -> None:
        self.group, self.world_size = group, rank_and_size(group)[1]
        self.average, self.reduce_dtype = average, reduce_dtype
        broadcast([*model.parameters(), *model.buffers()], group)
        self.buckets = in_buckets(model.parameters(), bucket_bytes)
        self._names = {parameter: name for name, parameter in model.named_parameters()}
        self._place = {parameter: number for number, bucket in enumerate(self.buckets) for parameter in bucket}
        self._arrived: set[nn.Parameter] = set()
        self._travelling: list[tuple[Tensor, dist.Work | None]] = []
        self._sync = True
        for parameter in self._place:
            parameter.register_post_accumulate_grad_hook(self._gradient_is_there)

    @property
    def started(self) -> int:
        return len(self._travelling)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward inside only adds to the gradients here; the next one outside, or `finish`, sends all that came."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def finish(self) -> None:
        """Put the reduced gradients of all buckets into `.grad`. Every rank, once a step, before gradients are used."""
        while self.started < len(self.buckets):
            self._start(self.buckets[self.started])
        for bucket, (vector, work) in zip(self.buckets, self._travelling, strict=True):
            if work is not None:
                work.wait()
            numbers = vector.split([parameter.numel() for parameter in bucket])
            for parameter, gradient in zip(bucket, numbers, strict=True):
                parameter.grad = gradient.view_as(parameter).to(parameter.dtype)
        self._arrived, self._travelling = set(), []

    def _gradient_is_there(self, parameter: nn.Parameter) -> None:
        """Called in backward by each parameter whose gradient is complete. (The hook gets the parameter itself.)"""
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
        """Let a bucket leave: its gradients in one vector, zeros for those that this rank has not."""
        gradients = []
        for parameter in bucket:
            gradients.append(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
            parameter.grad = None
        vector = torch.cat([gradient.detach().flatten() for gradient in gradients])
        vector = vector.to(self.reduce_dtype or vector.dtype)
        if self.average:
            vector /= self.world_size
        work = None if self.world_size == 1 else dist.all_reduce(vector, group=self.group, async_op=True)
        self._travelling.append((vector, work))
