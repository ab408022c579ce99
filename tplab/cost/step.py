"""Chapter 11: how long one training step takes, for a model, a layout over GPUs, and a machine.

A step of m micro-batches on pp stages, each stage on tp GPUs, dp times over. With t the seconds that the slowest stage
takes for one micro-batch, forward and backward (`layer_cost`), the step is the sum of

    compute, tensor parallel   m t               split into products, element-wise work and exposed communication
    pipeline bubble            (pp-1) t / v      v chunks of layers a stage; exactly: the t of all other stages, over v
    pipeline sends             2 (m v + pp - 1) messages of one micro-batch's [T, h]
    data parallel              all-reduce of the gradients on one GPU, in 16 bits, over dp ranks
    optimizer                  (gradient + 2 state + weight) bytes a parameter / bandwidth of the memory

Which GPU is whose neighbour decides over which link a group communicates. Ranks are numbered as in the mesh
(dp, pp, tp): tp innermost, its ranks next to each other; stages tp GPUs apart; replicas tp pp GPUs apart.

    achieved FLOP/s of a GPU      hardware FLOPs of the step / seconds / GPUs
    model-FLOPs utilisation       model FLOPs of the step / seconds / GPUs / peak FLOP/s       (MFU)

The step leaves out what `layer_cost` leaves out, and the data loader, the all-reduce of a tied embedding's gradient
between first and last stage, and one GPU waiting for a slower one, which grows with their number.
(Narayanan et al. 2021, section 3; Korthikanti et al. 2022, section 6.3; Chowdhery et al. 2022, "PaLM", for the MFU.)
"""

from dataclasses import dataclass, fields

from tplab.cost.collective import all_gather, all_reduce, send
from tplab.cost.flops import hardware_flops, logits, model_flops
from tplab.cost.layer import LayerTime, Pass, layer_time
from tplab.cost.machines import Machine
from tplab.memory.config import GPTConfig
from tplab.memory.memory_bill import ADAM, Layout, Recipe, layers_of_stage, rank_parameters


@dataclass(frozen=True)
class Program:
    """What a training program does beside its layout. Raises ValueError for less than one chunk.

    overlap_input_gradient    sum the gradient of a column-parallel input while that of the weight is computed
    overlap_gradients         sum the gradients over replicas during the backward pass of the last micro-batch
    chunks                    v, stages that each pipeline rank holds (interleaved 1F1B)
    scatter_gather            without sequence parallelism, each tp rank sends 1/tp of a stage's output, and the next
                              stage's ranks gather it (Narayanan et al. 2021, section 4.1)
    shard_optimizer           each replica updates 1/dp of the weights (ZeRO-1): reduce-scatter, then all-gather
    """

    overlap_input_gradient: bool = True
    overlap_gradients: bool = False
    chunks: int = 1
    scatter_gather: bool = False
    shard_optimizer: bool = False

    def __post_init__(self) -> None:
        if self.chunks < 1:
            raise ValueError(f"chunks={self.chunks}: each rank of a pipeline holds at least one")


@dataclass(frozen=True)
class StepTime:
    """Seconds of a training step, by what they are for."""

    products: float
    elementwise: float
    tensor_parallel: float
    bubble: float
    pipeline_sends: float
    data_parallel: float
    optimizer: float

    @property
    def compute(self) -> float:
        return self.products + self.elementwise

    @property
    def total(self) -> float:
        return sum(getattr(self, part.name) for part in fields(self))

    def parts(self) -> dict[str, float]:
        return {
            "matrix products": self.products, "element-wise": self.elementwise, "tensor parallel": self.tensor_parallel,
            "pipeline bubble": self.bubble, "pipeline sends": self.pipeline_sends,
            "data parallel": self.data_parallel, "optimizer": self.optimizer,
        }  # fmt: skip

    @property
    def limit(self) -> str:
        """The name of the part that costs most beside the matrix products."""
        beside = {name: seconds for name, seconds in self.parts().items() if name != "matrix products"}
        return max(beside, key=lambda name: beside[name])


@dataclass(frozen=True)
class Throughput:
    """What a step achieves: `hardware` and `model` in FLOP/s of one GPU, `hfu` and `mfu` as shares of its peak."""

    seconds: float
    hardware: float
    model: float
    hfu: float
    mfu: float


def step_time(
    config: GPTConfig, layout: Layout, machine: Machine, program: Program = Program(), recipe: Recipe = ADAM
) -> StepTime:
    """Seconds of one step. Raises ValueError where the layout does not fit the model, or the chunks its stages."""
    m, v = layout.steps, program.chunks
    _check_chunks(config, layout, v)
    layer = layer_time(
        config, machine, micro_batch=layout.micro_batch, tp=layout.tp, sequence_parallel=layout.sequence_parallel,
        recompute=layout.recompute, overlap=program.overlap_input_gradient,
    )  # fmt: skip
    stages = [_stage_time(config, layout, machine, layer, stage) for stage in range(layout.pp)]
    slowest = max(stages, key=lambda stage: stage.total)
    others = sum(stage.total for stage in stages) - slowest.total
    message = _send_time(config, layout, machine, program.scatter_gather)
    parameters = max(rank_parameters(config, layout, stage) for stage in {0, layout.pp - 1})
    summing = all_reduce(machine.link(layout.dp, layout.tp * layout.pp), recipe.gradients * parameters, layout.dp)
    if program.overlap_gradients:
        summing -= min(summing, 2 / 3 * slowest.compute)
    updated = parameters / (layout.dp if program.shard_optimizer else 1)
    return StepTime(
        products=m * slowest.products,
        elementwise=m * slowest.elementwise,
        tensor_parallel=m * slowest.exposed,
        bubble=others / v,
        pipeline_sends=2 * (m * v + layout.pp - 1) * message,
        data_parallel=summing,
        optimizer=(recipe.gradients + 2 * recipe.optimizer + recipe.weights) * updated / machine.bandwidth,
    )


def throughput(
    config: GPTConfig, layout: Layout, machine: Machine, program: Program = Program(), recipe: Recipe = ADAM
) -> Throughput:
    """What a step of the layout achieves on the machine."""
    return achieved(config, layout, machine, step_time(config, layout, machine, program, recipe).total)


def achieved(config: GPTConfig, layout: Layout, machine: Machine, seconds: float) -> Throughput:
    """What a step of so many seconds, predicted or measured, achieves."""
    hardware = hardware_flops(config, layout.sequences, layout.recompute) / layout.gpus / seconds
    model = model_flops(config, layout.sequences) / layout.gpus / seconds
    return Throughput(seconds, hardware, model, hardware / machine.flops, model / machine.flops)


def output_time(config: GPTConfig, machine: Machine, micro_batch: int, tp: int) -> Pass:
    """The output layer and its loss, forward and backward, with the vocabulary cut over tp ranks.

    Bytes a logit: forward it is written, read, written in float32 and read (12), backward read, written in 16 bits, and
    read by two products (10). The loss sums a few numbers a token over ranks, which is left out.
    """
    tokens = micro_batch * config.seq_length
    products = 3 * tokens * logits(config) / tp / machine.rate
    elementwise = (12 + 10) * tokens * config.vocab_size / tp / machine.bandwidth
    return Pass(products, elementwise, all_reduce(machine.link(tp), 2 * tokens * config.hidden_size, tp))


def _stage_time(config: GPTConfig, layout: Layout, machine: Machine, layer: LayerTime, stage: int) -> Pass:
    """One micro-batch on one stage, forward and backward."""
    time = layer.whole * layers_of_stage(config.num_layers, layout.pp, stage)
    if stage == 0:  # the embedding is summed over ranks
        size = 2 * layout.micro_batch * config.seq_length * config.hidden_size
        time += Pass(communication=all_reduce(machine.link(layout.tp), size, layout.tp))
    return time + output_time(config, machine, layout.micro_batch, layout.tp) if stage == layout.pp - 1 else time


def _send_time(config: GPTConfig, layout: Layout, machine: Machine, scatter_gather: bool) -> float:
    """One micro-batch from a stage to the next; where stages lie in several nodes, between nodes."""
    if layout.pp == 1:
        return 0.0
    link = machine.inside if layout.tp * layout.pp <= machine.gpus_per_node else machine.between
    size = 2 * layout.micro_batch * config.seq_length * config.hidden_size
    if layout.sequence_parallel:
        return send(link, size / layout.tp)
    if scatter_gather:
        return send(link, size / layout.tp) + all_gather(machine.link(layout.tp), size, layout.tp)
    return send(link, size)


def _check_chunks(config: GPTConfig, layout: Layout, chunks: int) -> None:
    if chunks > 1 and (config.num_layers % (layout.pp * chunks) or layout.steps % layout.pp or layout.pp == 1):
        raise ValueError(
            f"chunks={chunks} on pp={layout.pp} stages need at least two stages, num_layers={config.num_layers} "
            f"divisible by pp chunks={layout.pp * chunks}, and micro_batches={layout.steps} divisible by pp"
        )
