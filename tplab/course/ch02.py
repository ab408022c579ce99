"""What chapter 02 asks: the checks of its exercises, its predictions, its table of symptoms.

`shard` and `unshard` only cut and paste, so they are checked in this process. The two products run on 1, 2 and 4 ranks
with two- and three-dimensional inputs, and are compared with X @ A on one process, traffic included.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import gelu

from tplab.course.checking import (
    WORLD_SIZES,
    Differences,
    Observed,
    Question,
    Snapshot,
    Traffic,
    Verdict,
    exercise,
    fail,
    fresh_generator,
    must_refuse,
    run_ranks,
    traffic,
    verify,
)
from tplab.course.predictions import Prediction
from tplab.course.symptoms import Symptom
from tplab.runtime import device, record

IN, OUT = 8, 12  # divisible by every p, and different, so that a mix-up shows


def random(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def kind_is(*kinds: str, name: str = "out") -> Callable[[Differences], bool]:
    """The output is wrong in one of these ways."""
    return lambda differences: differences.kind(name) in kinds


def only_traffic(differences: Differences) -> bool:
    """The right numbers came by another way."""
    return differences.names == {"traffic"}


def sent(*words: str) -> Callable[[Differences], bool]:
    """The right numbers came by another way, and the recorded traffic has all these words in it."""
    return lambda differences: (
        only_traffic(differences) and all(word in d.text.partition("saw")[2] for word in words for d in differences)
    )


# ---------------------------------------------------------------------------------------------------------------------
# 2.1: shard and unshard

# Shapes with a dimension that can't be divided beside one that can, and one whose size is p or less
CUTS = [((8,), 0), ((8, 12), 0), ((8, 12), 1), ((3, 8), 1), ((8, 5), 0), ((3, 4, 5), 1), ((2, 3, 8), -1), ((8, 3), -2)]
REFUSED = [((8, 10), 1, 4), ((10, 8), 0, 4), ((4, 6, 8), -2, 4), ((2,), 0, 4), ((5,), 0, 2)]

_EVEN = (
    "What does your code do when size % world_size is not 0? Who notices, and when, if one rank's shard is smaller "
    "than the others'?"
)
_SHARD_QUESTIONS = (
    Question(
        lambda d: "changed" in d.kinds(),
        "Cutting and pasting only reads. Which line writes into a tensor that came in?",
    ),
    Question(
        lambda d: "dtype" in d.kinds(), "A shard holds the same numbers in fewer places. What changed their dtype?"
    ),
    Question(
        "contiguous",
        "A collective reads memory from front to back. Are the numbers of this shard next to each other in memory?",
    ),
    Question(
        lambda d: d.names <= {"bytes kept alive", "contiguous"} and "bytes kept alive" in d.names,
        "Is the shard a copy, or a view into the whole tensor? While a view lives, what happens to the memory of the "
        "whole?",
    ),
    Question(
        lambda d: d.kind("shard") == "zeros",
        "The shape is right. Which line puts the numbers in?",
    ),
    Question(
        lambda d: "shard" in d.names and not d.malformed,
        "Rank r holds the r-th of p equal blocks of neighbours along dim. Where along dim does your rank r start, "
        "how far does it go, and do all other dimensions stay whole?",
    ),
    Question(
        "unshard",
        "The shards were cut along dim, in rank order. Along which dimension, and in which order, do they go back?",
    ),
)


@exercise("2.1", "shard and unshard")
def shard_and_unshard(shard: Callable[..., Tensor], unshard: Callable[..., Tensor]) -> Verdict:
    for p in WORLD_SIZES:
        generator = fresh_generator()
        for shape, dim in CUTS:
            whole = random(generator, *shape)
            parts = [part.clone(memory_format=torch.contiguous_format) for part in whole.chunk(p, dim)]
            if len(parts) == p and all(part.shape == parts[0].shape for part in parts):
                seen = [_cut_and_paste(shard, unshard, whole, parts, dim, rank, p) for rank in range(p)]
                expected = [
                    {
                        "shard": part,
                        "contiguous": True,
                        "bytes kept alive": part.numel() * part.element_size(),
                        "unshard": whole,
                    }
                    for part in parts
                ]
                note = f"shape {list(shape)}, dim={dim}"
                verify("2.1", p, seen, expected, questions=_SHARD_QUESTIONS, tol=0, note=note)
    for shape, dim, p in REFUSED:
        for rank in range(p):
            must_refuse(
                "2.1",
                lambda: shard(torch.zeros(shape), dim, rank, p),  # noqa: B023 (called at once)
                _EVEN,
                says=(shape[dim], p),
                what=f"shard(a tensor of shape {list(shape)}, dim={dim}, rank={rank}, world_size={p})",
            )
    return Verdict("Along any dimension, and a size that can't be divided is refused on every rank.")


def _cut_and_paste(
    shard: Callable[..., Tensor],
    unshard: Callable[..., Tensor],
    whole: Tensor,
    parts: Sequence[Tensor],
    dim: int,
    rank: int,
    p: int,
) -> Observed:
    given = [part.clone() for part in parts]
    before = Snapshot(tensor=whole, **{f"shards[{i}]": part for i, part in enumerate(given)})
    mine = shard(whole, dim, rank, p)
    is_tensor = isinstance(mine, Tensor)
    return {
        "shard": mine,
        "contiguous": is_tensor and mine.is_contiguous(),
        "bytes kept alive": mine.untyped_storage().nbytes() if is_tensor else 0,
        "unshard": unshard(given, dim),
        "inputs unchanged": before.changed(),
    }


# ---------------------------------------------------------------------------------------------------------------------
# 2.2 and 2.3: the two products on real ranks


Product = Callable[[Tensor, Tensor], Tensor]


def run_product(product: Product, cases: Sequence[Sequence[tuple[Tensor, Tensor]]]) -> list[Observed]:
    """On a rank: product(x, a) for every case; cases[i][rank] has what this rank is given."""
    noted = []
    for case in cases:
        x, a = (tensor.to(device()) for tensor in case[dist.get_rank()])
        before = Snapshot(**{"the first argument": x, "the second argument": a})
        with record() as section:
            out = product(x, a)
        noted.append({"out": out, "traffic": traffic(section), "inputs unchanged": before.changed()})
    return noted


Lookalikes = Mapping[str, Mapping[str, Sequence[Tensor]]]


def check_product(
    number: str,
    product: Product,
    cut_x: Callable[[Tensor, int], Sequence[Tensor]],
    dim_of_a: int,
    collective: str,
    lookalikes: Callable[[Sequence[Tensor], Tensor], Lookalikes],
    questions: Sequence[Question],
) -> None:
    """Run one of the two products on 1, 2 and 4 ranks; each has one collective of the size of Y."""
    for p in (2, 4, 1):  # two ranks tell most about a mistake
        generator = fresh_generator()
        leading = ((5,), (2, 3))  # x [b, in] and [b, s, in]
        wholes = [(random(generator, *shape, IN), random(generator, IN, OUT)) for shape in leading]
        cases = [list(zip(cut_x(x, p), a.chunk(p, dim_of_a), strict=True)) for x, a in wholes]
        cases = [[(x.contiguous(), a.contiguous()) for x, a in case] for case in cases]
        seen = run_ranks(run_product, p, product, cases)
        for index, (x, a) in enumerate(wholes):
            y = x @ a
            products = [x_part @ a_part for x_part, a_part in cases[index]]
            expected = [{"out": y, "traffic": Traffic.expected(p, (collective, y.numel()))}] * p
            verify(
                number,
                p,
                [noted[index] for noted in seen],
                expected,
                questions=questions,
                lookalikes=lookalikes(products, y),
                note=f"x of {x.dim()} dimensions",
            )


_OWN = "this rank's own product"
_STACKED = "the products of all ranks, one after another along dimension 0"
_RESHAPED = "the products of all ranks along dimension 0, reshaped to the shape of Y"
_SUM = "the sum of the products of all ranks"
_COPIES = "p copies of this rank's product side by side"
_BESIDE = "the products of all ranks, side by side"
_P_TIMES_OWN = "p times this rank's own product"
_LARGEST = "the largest of the ranks' products, entry by entry"

_ROOT_ONLY = Question(
    lambda d: d.p > 1 and "out" in d.names and 0 not in d.ranks("out"),
    "Rank 0 is right, the others are not. Which collective gives its result to one rank, and which to all?",
)
_ZEROS = Question(
    lambda d: "zeros" in d.kinds() and not d.malformed,
    "The shape is right. Which line puts numbers in, and is it reached?",
)
_LATE = Question(
    lambda d: "never waited" in d.kinds(),
    "The collective was started with async_op=True. From when on may its result be read?",
)
_WEIGHTS_MOVED = Question(
    sent(f"of {IN * OUT} elements"),
    f"The numbers are right, but {IN * OUT} elements is the size of A: the weights were sent. They are the large "
    "part, and the reason to split. Multiply first: what has to be sent then?",
)
_TWICE = Question(
    sent(" 2 all_"),
    "The numbers are right. Is the second collective needed, and what would each cost?",
)
_MORE = Question(
    only_traffic,
    "The numbers are right, but by more steps or more bytes than it takes. After each rank's product one collective "
    "is enough: which?",
)

_ROUNDED = Question(
    lambda d: bool({"rounded", "dtype"} & d.kinds()),
    "Which step leaves the dtype of x? Fewer bytes are sent that way, and digits are lost.",
)

_COLUMN_QUESTIONS = (
    _LATE,
    _ROUNDED,
    Question(
        lambda d: "order" in d.kinds(),
        "The right columns, in another order. all_gather fills its list in rank order, the same on every rank: what "
        "did you do with it?",
    ),
    _ROOT_ONLY,
    _ZEROS,
    Question(kind_is(_OWN), "These are this rank's columns of Y. Who has the others, and how do they get here?"),
    Question(
        kind_is(_STACKED, _RESHAPED),
        "The parts of Y are columns. Along which dimension were they put together? (all_gather_into_tensor always uses "
        "dimension 0, and a reshape doesn't move numbers between rows as you need it.)",
    ),
    Question(kind_is(_SUM), "The parts are different columns of Y, not terms of a sum. Should they be added?"),
    Question(
        lambda d: d.names == {"out"} and any(_COPIES in row.text for row in d),
        "One part stands in all p places. Are the p tensors of your list p different ones? ([tensor] * p is p times "
        "the same.)",
    ),
    Question(kind_is(_COPIES), "Every part came from this rank. Which call brings the other ranks' parts here?"),
    Question(
        lambda d: d.kind("out") == "shape",
        "x is [.., in], with any number of dimensions in front. Which dimension of the product is `out`, counted "
        "from the end?",
    ),
    Question(
        sent("all_reduce"),
        "The numbers are right. But an all-reduce adds, and here nothing has to be added: each column of Y is "
        "finished on one rank. Which collective only brings the parts together, for half of what an all-reduce "
        "sends?",
    ),
    Question(
        sent("broadcast", "all_gather"),
        "Who already holds x? (It is replicated: look at the docstring.) What does the broadcast change?",
    ),
    _WEIGHTS_MOVED,
    _TWICE,
    _MORE,
)

_ROW_QUESTIONS = (
    _LATE,
    _ROUNDED,
    _ROOT_ONLY,
    _ZEROS,
    Question(
        kind_is(_OWN),
        "Each rank has its own terms of the sum. Who adds up the terms of all ranks? (If you did call all_reduce: "
        "which tensor did it write to, and which one do you return?)",
    ),
    Question(kind_is("1/p"), "Y is the sum of the products. Is it their mean?"),
    Question(kind_is(_LARGEST), "Which operation over the ranks makes Y out of the terms: their maximum?"),
    Question(kind_is("p times"), "How many times is each term added?"),
    Question(
        kind_is(_P_TIMES_OWN), "These are p times this rank's own terms. Where do the other ranks' terms come in?"
    ),
    Question(
        kind_is(_BESIDE, _STACKED),
        "Each product has the full shape of Y already. Do the products stand side by side, or add up?",
    ),
    Question(
        lambda d: any(d.kind(name) == "changed" for name in d.names) and "out" in d.names,
        "Y is a sum of products. Is it the product of a sum? What did all_reduce write into?",
    ),
    _WEIGHTS_MOVED,
    Question(
        sent("reduce_scatter", "all_gather"),
        "The numbers are right, and in a ring the bytes are too: these two together are what an all-reduce does. "
        "Which single call does both?",
    ),
    Question(
        sent("all_gather"),
        "The numbers are right, but every rank received p tensors of the size of Y to add them up itself. Which "
        "collective adds on the way?",
    ),
    Question(
        sent("broadcast", "reduce"),
        "The numbers are right, in two steps: to one rank, then from it to all. Which single collective does both?",
    ),
    _TWICE,
    _MORE,
)


def _column_lookalikes(products: Sequence[Tensor], y: Tensor) -> Lookalikes:
    p, stacked = len(products), torch.cat(list(products))
    if p == 1:
        return {}
    return {
        "out": {
            _OWN: products,
            _STACKED: [stacked] * p,
            _RESHAPED: [stacked.reshape(y.shape)] * p,
            _SUM: [torch.stack(list(products)).sum(0)] * p,
            _COPIES: [torch.cat([part] * p, -1) for part in products],
        }
    }


def _row_lookalikes(products: Sequence[Tensor], y: Tensor) -> Lookalikes:
    p = len(products)
    if p == 1:
        return {}
    return {
        "out": {
            _OWN: products,
            _P_TIMES_OWN: [p * part for part in products],
            _LARGEST: [torch.stack(list(products)).amax(0)] * p,
            _BESIDE: [torch.cat(list(products), -1)] * p,
            _STACKED: [torch.cat(list(products))] * p,
        }
    }


@exercise("2.2", "Y = [X A_0, X A_1, ...] on real ranks")
def column_split(column_product: Product) -> Verdict:
    check_product(
        "2.2",
        column_product,
        cut_x=lambda x, p: [x] * p,
        dim_of_a=1,
        collective="all_gather",
        lookalikes=_column_lookalikes,
        questions=_COLUMN_QUESTIONS,
    )
    return Verdict("One all-gather of b·out numbers. The weights stayed where they were.")


@exercise("2.3", "Y = X_0 A_0 + X_1 A_1 + ... on real ranks")
def row_split(row_product: Product) -> Verdict:
    check_product(
        "2.3",
        row_product,
        cut_x=lambda x, p: x.chunk(p, -1),
        dim_of_a=0,
        collective="all_reduce",
        lookalikes=_row_lookalikes,
        questions=_ROW_QUESTIONS,
    )
    return Verdict("One all-reduce of b·out numbers. The weights stayed where they were.")


# ---------------------------------------------------------------------------------------------------------------------
# 2.4: GELU and the row split


def gap(x: Tensor, a: Tensor, p: int, activation: Callable[[Tensor], Tensor] = gelu) -> Tensor:
    """Signed difference of every entry: GELU of the sum minus the sum of the GELUs, [b, out]."""
    products = [x_part @ a_part for x_part, a_part in zip(x.chunk(p, -1), a.chunk(p, 0), strict=True)]
    return activation(torch.stack(products).sum(0)) - torch.stack([activation(part) for part in products]).sum(0)


_SIGNED = "the largest signed difference: the negative ones don't count"
_SIGNED_OTHER = "the largest signed difference the other way round: the negative ones don't count"
_MEAN = "the mean of the absolute differences"
_TOTAL = "the sum of the absolute differences"
_TWO = "the gap for p = 2"
_TANH = "the gap of the tanh approximation of GELU"

_GAP_QUESTIONS = (
    Question(
        kind_is(_SIGNED, _SIGNED_OTHER, name="gelu_gap"),
        "Some differences are positive, some negative. How do you measure a size without its sign?",
    ),
    Question(kind_is(_MEAN, _TOTAL, name="gelu_gap"), "Which single number over all entries does the task ask for?"),
    Question(kind_is(_TWO, name="gelu_gap"), "Into how many shards does world_size say to cut?"),
    Question(
        kind_is(_TANH, name="gelu_gap"),
        "Which GELU does torch.nn.functional.gelu compute if you don't ask for an approximation?",
    ),
    Question(
        kind_is("zeros", name="gelu_gap"),
        "Your two sides are equal. On one of them GELU comes before the sum over the ranks. And which dimension of X "
        "and of A does a row split cut? (After a column split there is no gap.)",
    ),
    Question(
        lambda d: "gelu_gap" in d.names and not d.malformed,
        "Write both sides down for p = 2: GELU(X_0 A_0 + X_1 A_1), and GELU(X_0 A_0) + GELU(X_1 A_1). Which line of "
        "your code is which?",
    ),
)

Gap = Callable[[Tensor, Tensor, int], float]
Example = Callable[[], tuple[Tensor, Tensor]]


@exercise("2.4", "GELU after the sum and before it")
def gelu_and_the_row_split(gelu_gap: Gap, counter: Example, lucky: Example) -> Verdict:
    for p in WORLD_SIZES:
        generator = fresh_generator()
        large = random(generator, 5, IN) * 2, random(generator, IN, 3)  # most gaps are negative
        small = random(generator, 4, IN).abs() * 0.1, random(generator, IN, 6).abs() * 0.1  # all are positive
        for x, a in (large, small):
            right = gap(x, a, p)
            before = Snapshot(x=x, a=a)
            found = gelu_gap(x, a, p)
            is_number = isinstance(found, (int, float, Tensor))
            size = torch.as_tensor(found, dtype=torch.float64).detach() if is_number else found
            alike = {
                _SIGNED: [right.max()],
                _SIGNED_OTHER: [(-right).max()],
                _MEAN: [right.abs().mean()],
                _TOTAL: [right.abs().sum()],
                _TWO: [gap(x, a, 2).abs().max()],
                _TANH: [gap(x, a, p, lambda t: gelu(t, approximate="tanh")).abs().max()],
            }
            verify(
                "2.4",
                p,
                [{"gelu_gap": size, "inputs unchanged": before.changed()}] * p,
                [{"gelu_gap": right.abs().max()}] * p,
                questions=_GAP_QUESTIONS,
                lookalikes={"gelu_gap": {label: value * p for label, value in alike.items()}} if p > 1 else {},
            )
    _check_example("counter_example", counter)
    x, a = _check_example("lucky_example", lucky)
    smallest = min(float(x.abs().min()), float(a.abs().min()))
    if smallest < 0.1 - 1e-6:
        fail(
            "2.4",
            f"lucky_example holds the number {smallest:.3g}.",
            "With zeros and tiny numbers both sides are about 0. Where else is GELU a straight line through 0?",
        )
    return Verdict("The counter-example is off by at least 1, the lucky one looks right.")


def _check_example(name: str, example: Example) -> tuple[Tensor, Tensor]:
    """The two tensors of an example, once they have the right form and the right gap at p = 2."""
    pair = example()
    form = "x [b, in] and a [in, out], two floating-point tensors of two dimensions with in even"
    if not (isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(t, Tensor) and t.dim() == 2 for t in pair)):
        fail("2.4", f"{name}() should return {form}.", "What does your last line return, and what are the shapes?")
    x, a = pair
    shapes = f"{list(x.shape)} and {list(a.shape)}"
    if x.shape[1] != a.shape[0] or x.shape[1] % 2 or not x.numel() or not a.numel() or not x.is_floating_point():
        fail(
            "2.4", f"{name}() returned {shapes}; it should return {form}.", "Can x @ a be cut into two halves of `in`?"
        )
    size = float(gap(x.double(), a.double(), 2).abs().max())
    if name == "counter_example" and not size >= 1:
        fail(
            "2.4",
            f"the gap of counter_example is {size:.3g}, less than 1.",
            "GELU bends around 0. Which two terms lie on either side of the bend, and what is their sum?",
        )
    if name == "lucky_example" and not size < 1e-6:
        fail(
            "2.4",
            f"the gap of lucky_example is {size:.3g}, not below 1e-6.",
            "For which terms is GELU a straight line through 0, so that both sides agree? How large do they have to "
            "be?",
        )
    return x, a


# ---------------------------------------------------------------------------------------------------------------------

PREDICTIONS = {
    "2.a": Prediction(
        question="A is [1024, 4096], float32, split by columns over 4 devices. Rows and columns of a shard; MiB on "
        "each device.",
        answer={"rows": 1024, "columns": 1024, "mib": 4},
        why="A column split cuts the columns only: [1024, 4096/4]. That is 1024 · 1024 numbers of 4 bytes, 4 MiB, a "
        "quarter of 16.",
        wrong={
            "rows": "Each column of A stays whole. How long is a column?",
            ("columns", 4096): "4096 columns are dealt out over 4 devices.",
            "columns": "4096 columns are dealt out over 4 devices.",
            ("mib", 16): "That is the whole of A. What does one device hold?",
            ("mib", 1): "Count bytes, not numbers: float32 takes 4 bytes.",
            "mib": "Rows times columns of one shard, times 4 bytes, divided by 1024 · 1024.",
        },
    ),
    "2.b": Prediction(
        question="Rank r starts with 10^r, for r = 0 to 3. What does rank 2 hold after the all-reduce? How many "
        "different numbers do its gathered parts hold?",
        answer={"after_all_reduce": 1111, "gathered": 4},
        why="The sum 1 + 10 + 100 + 1000 arrives on every rank, and so do the four parts, in rank order.",
        wrong={
            (
                "after_all_reduce",
                100,
            ): "100 is what rank 2 starts with. all_reduce writes the sum over all ranks into it.",
            ("after_all_reduce", 111): "Ranks 0, 1 and 2 give 111. Are they all there are?",
            "after_all_reduce": "Add up what the four ranks start with: 1, 10, 100, 1000.",
            ("gathered", 1): "all_gather doesn't add: it brings the parts of all ranks, each as it is.",
            "gathered": "One part from each rank, and every rank started with another number.",
        },
    ),
    "2.c": Prediction(
        question="The terms of one entry are +3 on rank 0 and -3 on rank 1. GELU of the entry? Sum of the GELUs of "
        "the terms?",
        answer={"right": 0, "added_after": 3},
        why="The entry is 3 - 3 = 0, and GELU(0) = 0. But GELU(3) is about 3 and GELU(-3) about 0, together about 3.",
        wrong={
            "right": "First the entry of Y, which is the sum of the two terms. Then GELU.",
            ("added_after", 0): "GELU(-3) is not -3: very negative numbers are cut off.",
            "added_after": "GELU(3) is about 3. What is GELU(-3), about?",
        },
    ),
    "2.d": Prediction(
        question="X [4, 8], A [8, 12], float32, 4 ranks. Bytes of the gathered tensor, of the tensor that is added "
        "up, and of the weights on each rank.",
        answer={"all_gather": 192, "all_reduce": 192, "weights": 96},
        why="Both messages are Y: 4 · 12 numbers of 4 bytes. A has 8 · 12 · 4 = 384 bytes, a quarter of them on each "
        "rank.",
        wrong={
            ("all_gather", 48): "That is one rank's part, or the count of numbers. All parts together, in bytes?",
            "all_gather": "All parts together are Y, [4, 12]. In bytes?",
            ("all_reduce", 48): "Each rank's product has the full shape of Y. And count bytes.",
            "all_reduce": "Each rank's product has the full shape of Y, [4, 12]. In bytes?",
            ("weights", 384): "That is the whole of A.",
            ("weights", 24): "Count bytes, not numbers: float32 takes 4 bytes.",
            "weights": "8 · 12 numbers of 4 bytes, dealt out over 4 ranks.",
        },
    ),
}

SYMPTOMS = [
    Symptom(
        "Right shape, every rank has other numbers, and their sum is right",
        "The tensor is still partial: the all-reduce after a row split is missing, or it wrote into another tensor",
        "2.3",
    ),
    Symptom(
        "The result has out/p columns",
        "The tensor is still sharded: the all-gather after a column split is missing",
        "2.2",
    ),
    Symptom(
        "Right numbers in the wrong places, or p·b rows",
        "Columns were put together along dimension 0, as all_gather_into_tensor does",
        "2.2",
    ),
    Symptom(
        "All ranks agree, and entries with terms of both signs are too large",
        "A nonlinearity was applied to partial sums",
        "2.4",
    ),
    Symptom(
        "The result is None",
        "dist.all_reduce works in place and returns nothing; its argument holds the sum",
        "2.3",
    ),
    Symptom(
        "Shapes differ between ranks, or a collective hangs",
        "A size that can't be divided evenly was cut all the same",
        "2.1",
    ),
    Symptom(
        "Every rank holds a shard, but memory did not shrink",
        "The shard is a view, and keeps the whole tensor alive",
        "2.1",
    ),
]
