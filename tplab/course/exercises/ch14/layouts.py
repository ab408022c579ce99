"""The check for exercise 14.5, a layout for a cluster, which is judged by its requirements and its predicted time.

Any layout is right if it uses every GPU, divides everything evenly, keeps the tensor-parallel ranks in one node, fits
into memory, and is hardly slower than the best layout. The function `seconds`, which the answer receives, predicts how
long a step takes with a layout.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tplab.course.checks import Claim, Question, Verdict, calling, exercise, fail, must_refuse, verify
from tplab.memory.config import GPTConfig
from tplab.memory.memory_bill import Layout, bill

SLACK = 1.02  # the longest allowed time, relative to that of the best layout

ALL_GPUS = "dp · pp · tp is the number of GPUs"
EVEN = "heads, tokens, layers and sequences are divided evenly"
IN_NODE = "the tensor-parallel ranks are in one node"
FITS = "it fits the memory of a GPU"
FAST = "it is about as fast as the fastest"


@dataclass(frozen=True)
class Cluster:
    """A model on a cluster, with the costs that make up the predicted time.

    per_layer   seconds that a micro-batch takes in one layer on a single GPU
    tensor      seconds for a micro-batch's tensor-parallel messages in one layer, to be multiplied by (tp - 1) / tp
    data        seconds for data-parallel messages per billion parameters on a GPU, to be multiplied by (dp - 1) / dp
    """

    name: str
    config: GPTConfig
    gpus: int
    node: int
    gpu_bytes: int
    sequences: int
    per_layer: float
    tensor: float
    data: float

    def seconds(self, layout: Layout) -> float:
        """Predict the time of a step from compute, the bubble, and the messages of tensor and data parallelism."""
        layers, m = self.config.num_layers / layout.pp, layout.steps
        compute = (m + layout.pp - 1) * layers * self.per_layer / layout.tp
        tensor = (m + layout.pp - 1) * layers * self.tensor * (layout.tp - 1) / layout.tp
        parameters = 12 * self.config.num_layers * self.config.hidden_size**2 / 1e9 / layout.tp / layout.pp
        return compute + tensor + self.data * parameters * (layout.dp - 1) / layout.dp

    def call(self) -> str:
        c = self.config
        model = f"{c.num_layers} layers, h = {c.hidden_size}, {c.num_heads} heads"
        cluster = f"{self.gpus} GPUs of {self.gpu_bytes / 1e9:g} GB, {self.node} in a node"
        return f"{self.name}: {model}; {cluster}; {self.sequences} sequences"


def gpt(layers: int, hidden: int, heads: int, vocab: int = 50304, seq: int = 2048) -> GPTConfig:
    return GPTConfig(num_layers=layers, hidden_size=hidden, num_heads=heads, vocab_size=vocab, seq_length=seq)


def layout(dp: int, pp: int, tp: int, sequences: int) -> Layout:
    return Layout(dp=dp, pp=pp, tp=tp, micro_batches=sequences // dp, sequence_parallel=True, recompute="attention")


GB = 10**9
SMALL = gpt(24, 1024, 16)
TO_THE_LAST_BYTE = bill(SMALL, layout(16, 1, 1, 64)).total
CLUSTERS = (
    Cluster("a small model", SMALL, 16, 8, 80 * GB, 64, 0.01, 0.02, 0.01),
    Cluster("a small model that fills its GPUs to the last byte", SMALL, 16, 8, TO_THE_LAST_BYTE, 64, 0.01, 0.02, 0.01),
    Cluster("a model that fills a node", gpt(32, 4096, 32), 8, 8, 80 * GB, 32, 0.01, 0.002, 0.05),
    Cluster("a model larger than a node", gpt(80, 8192, 64), 64, 8, 80 * GB, 64, 0.05, 0.01, 0.05),
    Cluster("few sequences", gpt(48, 6144, 48), 32, 4, 80 * GB, 8, 0.05, 0.001, 0.2),
    Cluster("nodes of 8, 24 heads", gpt(24, 3072, 24), 24, 8, 40 * GB, 48, 0.02, 0.0001, 1.0),
    Cluster("heads that 8 GPUs don't divide", gpt(30, 2560, 20), 8, 8, 80 * GB, 2, 0.05, 0.001, 0.05),
    Cluster("layers that few numbers divide", gpt(30, 5120, 40), 16, 8, 80 * GB, 32, 0.01, 0.05, 0.05),
    Cluster("sequences that few numbers divide", gpt(24, 1024, 16), 16, 8, 80 * GB, 12, 0.01, 0.02, 0.01),
    Cluster(
        "nodes of 6, a sequence that 3 ranks don't divide", gpt(24, 3072, 24), 12, 6, 80 * GB, 8, 0.05, 0.001, 0.05
    ),
    Cluster("a large vocabulary", gpt(8, 1024, 16, 256000, 8192), 8, 8, 10 * GB, 8, 0.01, 0.02, 0.2),
)
TOO_SMALL = Cluster("a model that fits nowhere", gpt(96, 12288, 96), 16, 8, 40 * GB, 32, 0.01, 0.01, 0.05)


def even(c: Cluster, dp: int, pp: int, tp: int) -> bool:
    by_tp = c.config.num_heads % tp == 0 and c.config.seq_length % tp == 0
    return by_tp and c.config.num_layers % pp == 0 and c.sequences % dp == 0


def possible(c: Cluster) -> Iterator[Layout]:
    """Yield every layout that satisfies all requirements."""
    for tp in range(1, c.gpus + 1):
        for pp in range(1, c.gpus // tp + 1):
            dp = c.gpus // tp // pp
            if dp * pp * tp == c.gpus and even(c, dp, pp, tp) and c.node % tp == 0:
                found = layout(dp, pp, tp, c.sequences)
                if bill(c.config, found).total <= c.gpu_bytes:
                    yield found


def judged(c: Cluster, said: Layout, best: Layout) -> dict[str, Claim]:
    """Return claims about a layout. Each claim that doesn't hold says in words what is wrong."""
    dp, pp, tp = said.dp, said.pp, said.tp
    spelled = f"dp = {dp}, pp = {pp}, tp = {tp}"
    claims = {ALL_GPUS: "" if dp * pp * tp == c.gpus else f"{spelled} are {dp * pp * tp} of {c.gpus} GPUs"}
    claims[IN_NODE] = "" if c.node % tp == 0 else f"tp = {tp} with {c.node} GPUs in a node"
    claims[EVEN] = "" if even(c, dp, pp, tp) else f"{spelled} do not divide them"
    claims[EVEN] = claims[EVEN] or ("" if said.steps == c.sequences // dp else f"{said.steps} micro-batches")
    if not any(claims.values()):
        need = bill(c.config, said).total
        claims[FITS] = (
            "" if need <= c.gpu_bytes else f"{spelled} needs {need / 1e9:.1f} GB of {c.gpu_bytes / 1e9:.1f} GB"
        )
        if not claims[FITS]:
            mine, least = c.seconds(said), c.seconds(best)
            better = f"dp = {best.dp}, pp = {best.pp}, tp = {best.tp}"
            slow = f"{spelled} takes {mine:.3g} s, {better} takes {least:.3g} s"
            claims[FAST] = "" if mine <= SLACK * least else slow
    return {name: Claim(text) for name, text in claims.items()}


@exercise("14.5", "A layout for a cluster")
def a_layout_for_a_cluster(choose_layout: Callable[..., Any]) -> Verdict:
    for c in CLUSTERS:
        best = min(possible(c), key=c.seconds)
        possible_one = f"dp = {best.dp}, pp = {best.pp}, tp = {best.tp}"
        with calling(f"choose_layout for {c.call()}", CRASH.format(possible_one)):
            said = choose_layout(c.config, c.gpus, c.node, c.gpu_bytes, c.sequences, c.seconds)
        if not isinstance(said, Layout):
            got = "None" if said is None else f"a {type(said).__name__}"
            fail("14.5", f"choose_layout returned {got} for {c.call()}.", "The result is one of the layouts. Which?")
        verify("14.5", c.gpus, [judged(c, said, best)], [{}], questions=QUESTIONS, note=c.call(), alone=True)
    c = TOO_SMALL
    must_refuse(
        "14.5",
        lambda: choose_layout(c.config, c.gpus, c.node, c.gpu_bytes, c.sequences, c.seconds),
        "No layout fits here. What does your function do when none is left?",
        what=f"choose_layout for {c.call()}",
    )
    return Verdict("Every GPU works, the model fits, tp stays inside a node, and no other layout is much faster.")


CRASH = (
    "{} is possible here. Which condition throws it out; or which impossible layout do you hand to `layout_of` and "
    "`bill` before you have asked whether it divides everything?"
)
QUESTIONS = (
    Question(
        lambda d: ALL_GPUS in d.names,
        "A GPU that is in no group does nothing. If tp and pp are chosen, which dp is left?",
    ),
    Question(
        lambda d: IN_NODE in d.names,
        "Ranks are counted node by node, and tp ranks are neighbours. Which tp leave no group across the border of two "
        "nodes?",
    ),
    Question(
        lambda d: EVEN in d.names,
        "Each rank takes whole heads and, with sequence parallelism, as many tokens as all other ranks. Each stage "
        "takes whole layers and as many as all other stages. Each replica takes whole sequences. Which of these four "
        "does your layout not divide? Does `layout_of` get the number of sequences?",
    ),
    Question(
        lambda d: FITS in d.names,
        "`bill(config, layout).total` are the bytes of the fullest GPU. With what do you compare them?",
    ),
    Question(
        lambda d: FAST in d.names,
        "Another layout that fits is faster, by the `seconds` that you were given. Which layouts do you try, and what "
        "do you choose by?",
    ),
)
