"""Chapter 11: the time of one training step, for a model, a layout over GPUs, and a machine.

A step runs m micro-batches through pp stages of tp GPUs each, on dp replicas. If the slowest stage takes t seconds for
one micro-batch, forward and backward (`tplab.cost.layer`), the step is the sum of

    compute, tensor parallel   m t               matmuls, element-wise work, kernel launches, exposed communication
    pipeline bubble            (pp-1) t / v      v chunks of layers per stage; exactly, the other stages' times / v
    pipeline sends             2 (m v + pp - 1) messages of one micro-batch's [T, h]
    data parallel              all-reduce of one GPU's gradients, in 16 bits, over dp ranks
    optimizer                  (gradient + 2 state + weight) bytes per parameter / memory bandwidth

The positions of a group's GPUs determine which link it uses. Ranks are numbered as in the mesh (dp, pp, tp): tp is
innermost, so its ranks are adjacent; stages are tp GPUs apart; replicas are tp pp GPUs apart.

    achieved FLOP/s per GPU       hardware FLOPs of the step / seconds / GPUs
    model-FLOPs utilization       model FLOPs of the step / seconds / GPUs / peak FLOP/s       (MFU)

In addition to what `tplab.cost.layer` leaves out, the model omits the data loader, the all-reduce of a tied embedding's
gradient between the first and last stages, and the time spent waiting for slower GPUs, which grows with the number of
GPUs. (Narayanan et al. 2021, section 3; Korthikanti et al. 2022, section 6.3; Chowdhery et al. 2022, "PaLM", for the
MFU.)
"""

from dataclasses import dataclass, fields

from tplab.cost.collective import all_gather, all_reduce
from tplab.cost.flops import hardware_flops, model_flops
from tplab.cost.layer import LayerTime, Pass, layer_time
from tplab.cost.machines import Machine
from tplab.cost.matmul import Matmul
from tplab.memory.config import GPTConfig
from tplab.memory.memory_bill import ADAM, Layout, Recipe, layers_of_stage, micro_batches_in_flight, rank_parameters


@dataclass(frozen=True)
class Program:
    """The options of a training program, except its layout.

    overlap_input_gradient    sum the gradient of a column-parallel input while the weight gradient is computed
    overlap_gradients         sum the gradients over replicas during the backward pass of the last micro-batch
    scatter_gather            without sequence parallelism, each tp rank sends 1/tp of a stage's output, and the next
                              stage's ranks gather it (Narayanan et al. 2021, section 4.1)
    shard_optimizer           each replica updates 1/dp of the weights (ZeRO-1): reduce-scatter, then all-gather
    """

    overlap_input_gradient: bool = True
    overlap_gradients: bool = False
    scatter_gather: bool = False
    shard_optimizer: bool = False


@dataclass(frozen=True)
class StepTime:
    """The time of a training step in seconds, by category."""

    products: float
    elementwise: float
    tensor_parallel: float
    bubble: float
    pipeline_sends: float
    data_parallel: float
    optimizer: float
    launches: float = 0.0

    @property
    def compute(self) -> float:
        return self.products + self.elementwise + self.launches

    @property
    def total(self) -> float:
        return sum(getattr(self, part.name) for part in fields(self))

    def parts(self) -> dict[str, float]:
        return {
            "matmuls": self.products, "element-wise": self.elementwise, "kernel launches": self.launches,
            "tensor parallel": self.tensor_parallel, "pipeline bubble": self.bubble,
            "pipeline sends": self.pipeline_sends, "data parallel": self.data_parallel, "optimizer": self.optimizer,
        }  # fmt: skip

    @property
    def limit(self) -> str:
        """The name of the most expensive category besides the matmuls."""
        beside = {name: seconds for name, seconds in self.parts().items() if name != "matmuls"}
        return max(beside, key=lambda name: beside[name])


@dataclass(frozen=True)
class Throughput:
    """The throughput of a step: `hardware` and `model` in FLOP/s per GPU, `hfu` and `mfu` as fractions of the peak."""

    seconds: float
    hardware: float
    model: float
    hfu: float
    mfu: float


def step_time(
    config: GPTConfig, layout: Layout, machine: Machine, program: Program = Program(), recipe: Recipe = ADAM
) -> StepTime:
    """Return the time of one step. Raises ValueError if the layout or its chunks don't fit the model."""
    m, v = layout.steps, layout.chunks
    micro_batches_in_flight(config, layout, 0)  # checks the chunks
    layer = layer_time(
        config, machine, micro_batch=layout.micro_batch, tp=layout.tp, sequence_parallel=layout.sequence_parallel,
        recompute=layout.recompute, overlap=program.overlap_input_gradient,
    )  # fmt: skip
    stages = [_stage_time(config, layout, machine, layer, stage) for stage in range(layout.pp)]
    slowest = max(stages, key=lambda stage: stage.total)
    others = sum(stage.total for stage in stages) - slowest.total
    message = _send_time(config, layout, machine, program.scatter_gather)
    parameters = max(rank_parameters(config, layout, stage) for stage in {0, layout.pp - 1})
    link = machine.link(layout.dp, layout.tp * layout.pp)
    summing = all_reduce(link, recipe.gradients * parameters, layout.dp, "fastest")
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
        optimizer=(recipe.gradients + 2 * recipe.optimizer + recipe.weights) * updated / machine.memory_rate,
        launches=m * slowest.launches,
    )


def throughput(
    config: GPTConfig, layout: Layout, machine: Machine, program: Program = Program(), recipe: Recipe = ADAM
) -> Throughput:
    """Return the throughput of the layout on the machine, computed from its `step_time`."""
    return achieved(config, layout, machine, step_time(config, layout, machine, program, recipe).total)


def achieved(config: GPTConfig, layout: Layout, machine: Machine, seconds: float) -> Throughput:
    """Return the throughput of a step that takes `seconds`, whether predicted or measured."""
    hardware = hardware_flops(config, layout.sequences, layout.recompute) / layout.gpus / seconds
    model = model_flops(config, layout.sequences) / layout.gpus / seconds
    return Throughput(seconds, hardware, model, hardware / machine.flops, model / machine.flops)


def output_time(config: GPTConfig, machine: Machine, micro_batch: int, tp: int) -> Pass:
    """Return the time of the output layer and its loss, forward and backward, for a vocabulary sharded over tp ranks.

    Per logit, the forward pass writes 2 bytes, reads them, writes 4 bytes (float32), and reads those, which is 12
    bytes. The backward pass reads 4 bytes, writes 2, and reads 2 for each of two matmuls, which is 10 bytes. The
    all-reduces of the loss are left out.
    """
    tokens = micro_batch * config.seq_length
    forward = Matmul(tokens, config.hidden_size, config.vocab_size / tp)
    products = sum(matmul.seconds(machine) for matmul in (forward, *forward.backward()))
    elementwise = (12 + 10) * tokens * config.vocab_size / tp / machine.memory_rate
    summing = all_reduce(machine.link(tp), 2 * tokens * config.hidden_size, tp, "fastest")
    return Pass(products, elementwise, summing, launches=8 * machine.losses.launch)


def _stage_time(config: GPTConfig, layout: Layout, machine: Machine, layer: LayerTime, stage: int) -> Pass:
    """Return the time in seconds of one micro-batch on one stage, forward and backward."""
    time = layer.whole * layers_of_stage(config.num_layers, layout.pp, stage)
    if machine.losses.bookkeeping and layout.steps > 1:  # adding 16-bit gradients reads two and writes one
        time += Pass(elementwise=6 * rank_parameters(config, layout, stage) / machine.memory_rate)
    if stage == 0:  # the embedding's output is summed over ranks
        size = 2 * layout.micro_batch * config.seq_length * config.hidden_size
        time += Pass(communication=all_reduce(machine.link(layout.tp), size, layout.tp, "fastest"))
    return time + output_time(config, machine, layout.micro_batch, layout.tp) if stage == layout.pp - 1 else time


def _send_time(config: GPTConfig, layout: Layout, machine: Machine, scatter_gather: bool) -> float:
    """Return the time to send a micro-batch to the next stage, over the network if that's on a different node."""
    if layout.pp == 1:
        return 0.0
    link = machine.inside if layout.tp * layout.pp <= machine.gpus_per_node else machine.between
    size = 2 * layout.micro_batch * config.seq_length * config.hidden_size
    if layout.sequence_parallel:
        return link.seconds(size / layout.tp)
    if scatter_gather:
        return link.seconds(size / layout.tp) + all_gather(machine.link(layout.tp), size, layout.tp)
    return link.seconds(size)
