"""What chapter 03's checks ask when an operator is wrong, and what known mistakes give (`..._lookalikes`)."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tplab.course.ch03_operators import Lookalikes, my_part, total
from tplab.course.checking import Differences, Question


def kind_is(name: str, *kinds: str) -> Callable[[Differences], bool]:
    return lambda differences: differences.kind(name) in kinds


def traffic_too(name: str, kind: str, traffic: str) -> Callable[[Differences], bool]:
    """`name` is wrong in this way, and `traffic` differs as well."""
    return lambda differences: differences.kind(name) == kind and traffic in differences.names


_FORWARD_SENDS = Question(
    lambda d: "forward traffic" in d.names and d.kind("forward traffic") == "traffic" and not d.malformed,
    "What does this operator have to send in the forward pass? Read its row in the table again.",
)
_BACKWARD_SENDS = Question(
    lambda d: d.names == {"backward traffic"},
    "The gradient is right. What has to be sent for it in the backward pass? Read the operator's row in the table "
    "again.",
)
_LATE = Question(
    lambda d: "never waited" in d.kinds(),
    "The collective was started with async_op=True. From when on may its result be read?",
)
_ROUNDED = Question(
    lambda d: bool({"rounded", "dtype"} & d.kinds()),
    "Which step leaves the dtype of the tensor? Fewer bytes are sent that way, and digits are lost.",
)
_WROTE = Question(
    lambda d: any(d.kind(name) == "changed" for name in d.names),
    "A collective writes into the tensor it is given. Was that one yours? The caller still needs x, and autograd the "
    "upstream gradient: what has to be made first? (.contiguous() makes no copy of a tensor that is contiguous "
    "already.)",
)
_NO_GRADIENT = Question(
    kind_is("dx", "none"),
    "backward returned nothing for x. What is its last line? (dist.all_reduce changes its argument and returns None.)",
)
_ZERO_GRADIENT = Question(kind_is("dx", "zeros"), "The gradient has the right shape. Which line puts numbers in?")
_ZERO_OUT = Question(kind_is("out", "zeros"), "The output has the right shape. Which line puts numbers in?")

_OWN_TERM = "this rank's own upstream gradient, before the sum"
_OWN_X = "this rank's own x"
_SUM_X = "the sum of x over all ranks"
_SUM_UP = "the sum of the upstream gradients of all ranks"
_MEAN_X = "the mean of x over all ranks"
_X_OF_0 = "the x of rank 0"
_UP_OF_0 = "the upstream gradient of rank 0"
_P_TIMES_OWN = "p times this rank's own upstream gradient"
_LARGEST = "the largest over the ranks, entry by entry"

_ONLY_ROOT = (
    "Rank 0 is right, the others are not. Which collective gives its result to one rank only, and which to all?"
)

F_QUESTIONS = (
    _LATE,
    _ROUNDED,
    _WROTE,
    Question(
        kind_is("out", _SUM_X, _X_OF_0, _MEAN_X),
        "Forward, every rank has the right x already. What is left for f to do?",
    ),
    _ZERO_OUT,
    _FORWARD_SENDS,
    _NO_GRADIENT,
    _ZERO_GRADIENT,
    Question(lambda d: d.p > 1 and "dx" in d.names and 0 not in d.ranks("dx"), _ONLY_ROOT),
    Question(
        traffic_too("dx", _OWN_TERM, "backward traffic"),
        "x went to every rank, and the gradient of each rank covers its own path only. Who adds up the paths?",
    ),
    Question(
        kind_is("dx", _OWN_TERM),
        "An all-reduce ran, but the tensor you return does not hold the sum. Which tensor did it write into?",
    ),
    Question(
        kind_is("dx", _P_TIMES_OWN),
        "x went to every rank, and each rank's gradient is a different one. Where do the other ranks' come in?",
    ),
    Question(kind_is("dx", "1/p"), "The chain rule adds over all uses of x. Does it take their mean?"),
    Question(kind_is("dx", _LARGEST), "The chain rule adds over all uses of x. Does it take the largest?"),
    Question(kind_is("dx", "p times"), "How many times is each rank's term added?"),
    Question(
        lambda d: d.names == {"backward traffic"} and any("all_gather" in row.text for row in d),
        "The gradient is right, but every rank received p tensors to add them up itself. Which collective adds on "
        "the way?",
    ),
    _BACKWARD_SENDS,
)

G_QUESTIONS = (
    _LATE,
    _ROUNDED,
    _WROTE,
    _ZERO_OUT,
    Question(lambda d: d.p > 1 and "out" in d.names and 0 not in d.ranks("out"), _ONLY_ROOT),
    Question(
        traffic_too("out", _OWN_X, "forward traffic"),
        "Each rank holds one term of a sum. Who adds them up?",
    ),
    Question(
        kind_is("out", _OWN_X),
        "An all-reduce ran, but the tensor you return does not hold the sum. Which tensor did it write into? "
        "(.contiguous() makes a copy of a tensor that is not contiguous.)",
    ),
    Question(kind_is("out", "1/p"), "The network adds the terms. Does it take their mean?"),
    Question(kind_is("out", "p times"), "How many times is each rank's term added?"),
    Question(
        lambda d: d.names == {"forward traffic"} and any("all_gather" in row.text for row in d),
        "The sum is right, but every rank received p tensors to add them up itself. Which collective adds on the way?",
    ),
    _FORWARD_SENDS,
    _NO_GRADIENT,
    _ZERO_GRADIENT,
    Question(
        kind_is("dx", _SUM_UP),
        "All ranks share one loss, and each holds its whole gradient already. How often is it counted if you add the "
        "ranks' copies?",
    ),
    Question(
        kind_is("dx", "1/p", "p times"),
        "z = z_0 + z_1: how much does z change when one term changes by 1? Is there a p in it?",
    ),
    Question(kind_is("dx", _UP_OF_0), "Every rank holds the gradient already. Why ask rank 0 for it?"),
    _BACKWARD_SENDS,
)

_PART_OF_0 = "part 0 of x, whatever the rank"
_EVERY_PTH = "every p-th column of x"
_PADDED = "this rank's part of the gradient, and zeros elsewhere"
_COPIES = "p copies of this rank's part"
_SUM_PARTS = "the sum of the parts of all ranks"
_STACKED = "the parts of all ranks, one after another along dimension 0"
_SLICE_OF_SUM = "this rank's slice of the sum of all ranks' gradients"
_SLICE_OF_MEAN = "this rank's slice of the mean of all ranks' gradients"
_SLICE_0 = "slice 0 of the gradient, whatever the rank"
_WHOLE = "the whole gradient"
_WHOLE_X = "the whole x"

UNEVEN = "a size that can't be divided"
SCATTER_QUESTIONS = (
    Question(
        UNEVEN,
        "9 columns on 2 ranks: one rank would hold more than the other. What does the other half of the network make "
        "of that? (shard refuses such sizes for you.)",
    ),
    _LATE,
    _ROUNDED,
    _WROTE,
    _ZERO_OUT,
    Question(kind_is("out", _PART_OF_0), "Which part of x is this rank's own?"),
    Question(kind_is("out", _EVERY_PTH, "value"), "A shard is a block of neighbours. Which columns does rank r hold?"),
    Question(kind_is("out", _WHOLE_X), "What is left for this rank to cut away?"),
    Question(
        lambda d: "out" in d.names and not d.malformed,
        "Which dimension does scatter cut, how long is a part, and where does the part of rank r start?",
    ),
    _FORWARD_SENDS,
    _NO_GRADIENT,
    _ZERO_GRADIENT,
    Question(
        lambda d: d.kind("dx") in (_PADDED, "partly zero"),
        "The rest of the gradient is not zero: other ranks hold it. How does it get here?",
    ),
    Question(kind_is("dx", _COPIES), "Every part came from this rank. Which call brings the other ranks' parts?"),
    Question(kind_is("dx", _SUM_PARTS), "The parts are gradients of different columns of x. Should they be added?"),
    Question(
        lambda d: d.kind("dx") in (_STACKED, "order") or "order" in d.kinds(),
        "x was cut along the last dimension, in rank order. Along which dimension, and in which order, do the parts "
        "go back?",
    ),
    Question(
        kind_is("dx", "1/p", "p times"), "Each column of x was used by one rank, once. Is there a p in its gradient?"
    ),
    Question(
        lambda d: d.names == {"backward traffic"} and any("all_reduce" in row.text for row in d),
        "The gradient is right. But an all-reduce adds, and here nothing has to be added. Which collective only "
        "brings the parts together, for half of what an all-reduce sends?",
    ),
    _BACKWARD_SENDS,
)

GATHER_QUESTIONS = (
    _LATE,
    _ROUNDED,
    _WROTE,
    _ZERO_OUT,
    Question(kind_is("out", _OWN_X), "This is one part. Who holds the others?"),
    Question(kind_is("out", _COPIES), "Every part came from this rank. Which call brings the other ranks' parts?"),
    Question(kind_is("out", _SUM_PARTS), "The parts are different columns. Should they be added?"),
    Question(
        lambda d: "out" in d.names and (d.kind("out") in (_STACKED, "value") or "order" in d.kinds()),
        "Along which dimension, and in which order, do the parts go together? (all_gather_into_tensor uses dimension "
        "0.)",
    ),
    Question(
        lambda d: d.names == {"forward traffic"} and any("saw 1 all_reduce" in row.text for row in d),
        "The output is right. But an all-reduce adds, and here nothing has to be added. Which collective only brings "
        "the parts together, for half of what an all-reduce sends?",
    ),
    _FORWARD_SENDS,
    _NO_GRADIENT,
    _ZERO_GRADIENT,
    Question(
        kind_is("dx", _SLICE_OF_SUM, _SLICE_OF_MEAN),
        "All ranks share one loss, and each holds its whole gradient already. What is there to add, or to average?",
    ),
    Question(kind_is("dx", _SLICE_0), "Which columns of the whole did this rank put in?"),
    Question(
        lambda d: "dx" in d.names and any("got gradient" in row.text or "whole" in row.text for row in d),
        "This rank put in h/p columns. Which part of the whole gradient is theirs?",
    ),
    Question(
        kind_is("dx", "1/p", "p times"), "Each column was put in by one rank, once. Is there a p in its gradient?"
    ),
    _BACKWARD_SENDS,
)


def f_lookalikes(x: Sequence[Tensor], upstream: Sequence[Tensor]) -> Lookalikes:
    p = len(x)
    return {
        "out": {_SUM_X: total(x), _MEAN_X: [t / p for t in total(x)], _X_OF_0: [x[0]] * p},
        "dx": {
            _OWN_TERM: upstream,
            _P_TIMES_OWN: [p * up for up in upstream],
            _LARGEST: [torch.stack(list(upstream)).amax(0)] * p,
        },
    }


def g_lookalikes(x: Sequence[Tensor], upstream: Sequence[Tensor]) -> Lookalikes:
    return {"out": {_OWN_X: x}, "dx": {_SUM_UP: total(upstream), _UP_OF_0: [upstream[0]] * len(x)}}


def scatter_lookalikes(x: Sequence[Tensor], upstream: Sequence[Tensor]) -> Lookalikes:
    p = len(x)
    zeros = torch.zeros_like(upstream[0])
    padded = [torch.cat([upstream[r] if r == i else zeros for i in range(p)], -1) for r in range(p)]
    return {
        "out": {
            _PART_OF_0: [t.chunk(p, -1)[0] for t in x],
            _EVERY_PTH: [t[..., rank::p] for rank, t in enumerate(x)],
            _WHOLE_X: x,
        },
        "dx": {
            _PADDED: padded,
            _COPIES: [torch.cat([part] * p, -1) for part in upstream],
            _SUM_PARTS: total(upstream),
            _STACKED: [torch.cat(list(upstream)).reshape(x[0].shape)] * p,
        },
    }


def gather_lookalikes(x: Sequence[Tensor], upstream: Sequence[Tensor]) -> Lookalikes:
    p = len(x)
    mean = [t / p for t in total(upstream)]
    return {
        "out": {
            _OWN_X: x,
            _COPIES: [torch.cat([part] * p, -1) for part in x],
            _SUM_PARTS: total(x),
            _STACKED: [torch.cat(list(x))] * p,
        },
        "dx": {
            _SLICE_OF_SUM: my_part(total(upstream)),
            _SLICE_OF_MEAN: my_part(mean),
            _SLICE_0: [t.chunk(p, -1)[0] for t in upstream],
            _WHOLE: upstream,
        },
    }
