"""`tplab plan`: list the parallel layouts of a model that fit into a cluster's memory, fastest step first.

tplab plan --params 70e9 --gpus 64 --gpu h100
tplab plan --model "Llama 3 70B" --gpus 64 --gpu h100 --batch 512
"""

import argparse
from typing import TYPE_CHECKING, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tplab.course.learn.course_files import Misuse

if TYPE_CHECKING:
    from tplab.cluster.plan import Plan
    from tplab.cost.machines import Machine
    from tplab.memory.config import GPTConfig

GB = 10**9
COLUMNS: dict[str, Literal["left", "right"]] = {
    "tp": "right", "pp": "right", "dp": "right", "micro\nbatch": "right", "seq.\npar.": "left", "recomp.": "left",
    "state\nGB": "right", "activ.\nGB": "right", "sum\nGB": "right", "step\ns": "right", "TFLOP/s": "right",
    "MFU": "right",
}  # fmt: skip
ROWS = 10  # of the table
_BAR = 40  # length of the longest bar in characters


def add(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "plan",
        help="how to lay a model out over a cluster",
        description="Every layout over tensor-, pipeline- and data-parallel GPUs that fits into memory, fastest first.",
    )
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--params", type=parameters, metavar="N", help="parameters of the model: 70e9, or 70B")
    model.add_argument("--model", metavar="NAME", help='in place of --params a known model: "Llama 3 70B"')
    parser.add_argument("--gpus", type=int, required=True, metavar="N", help="how many GPUs")
    parser.add_argument(
        "--gpu", required=True, metavar="NAME", help="of which machine: v100, a100, h100, h200, b200, gb200"
    )
    parser.add_argument("--seq", type=int, metavar="N", help="tokens of a sequence (default: 4096, or the model's own)")
    parser.add_argument("--batch", type=int, metavar="N", help="sequences of a step (default: about 4 million tokens)")
    parser.add_argument("--shard-optimizer", action="store_true", help="divide the optimizer's state over replicas")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, console: Console) -> int:
    from tplab.cluster import plan  # imported here because it takes seconds
    from tplab.cost.machines import machine

    try:
        cluster = machine(options.gpu)
        config = _config(options)
        sequences = options.batch if options.batch is not None else plan.default_sequences(config, max(options.gpus, 1))
        found = plan.plans(config, options.gpus, cluster, sequences=sequences, shard_optimizer=options.shard_optimizer)
    except plan.NothingFits as error:
        console.print(Text(str(error), style="red"))
        return 1
    except ValueError as error:
        raise Misuse(str(error)) from None
    shown = plan.best_of_each_split(found)[:ROWS]
    console.print(Text(heading(options.model, config, cluster, options.gpus, sequences), style="bold"))
    console.print(Text(f"\n{where_the_time_goes(shown[0])}\n"))
    console.print(Text(f"{why(config, found)}\n"))
    console.print(table(shown))
    console.print(Text(footing(shown[0]), style="dim"))
    return 0


def heading(name: str | None, config: "GPTConfig", cluster: "Machine", gpus: int, sequences: int) -> str:
    """Return two lines that describe the model and the cluster."""
    from tplab.memory.config import parameter_count

    called = f"{name}, " if name else "A GPT of "
    return (
        f"{called}{parameter_count(config) / 1e9:.3g} billion parameters: {config.num_layers} layers, hidden size "
        f"{config.hidden_size}, {config.num_heads} heads, vocabulary {config.vocab_size}\n"
        f"{sequences} sequences of {config.seq_length} tokens a step on {gpus} GPUs of {cluster.name}, "
        f"{cluster.memory / GB:.0f} GB each"
    )


def where_the_time_goes(plan: "Plan") -> str:
    """Return a bar for each part of the step that takes at least 0.1% of the time, the longest one first."""
    parts = sorted(plan.time.parts().items(), key=lambda part: -part[1])
    lines = ["Where the time goes:"]
    for name, seconds in parts:
        if (share := seconds / plan.time.total) >= 0.001:
            bar = "█" * max(round(_BAR * seconds / parts[0][1]), 1)
            lines.append(f"  {name:<16} {seconds:>8.3g} s {share:>6.1%}  {bar}")
    return "\n".join(lines)


def why(config: "GPTConfig", found: "list[Plan]") -> str:
    """Return, for each option of the fastest layout, how much longer a step would take with other choices."""
    from tplab.cluster.plan import reasons

    lines = []
    for option, others in reasons(config, found).items():
        for value, longer in others:
            cost = "doesn't fit" if longer is None else "just as fast" if abs(longer) < 5e-4 else f"{longer:+.1%}"
            lines.append(f"  {f'{option}={value}':<26} {cost}")
    return "\n".join(["The same layout with one other choice:", *lines]) if lines else "There's no other choice."


def table(shown: "list[Plan]") -> Table:
    grid = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    for name, justify in COLUMNS.items():
        grid.add_column(name, justify=justify, no_wrap=True)
    for plan in shown:
        layout, bill = plan.layout, plan.bill
        grid.add_row(
            str(layout.tp),
            f"{layout.pp}x{layout.chunks}" if layout.chunks > 1 else str(layout.pp),
            str(layout.dp),
            str(layout.micro_batch),
            "yes" if layout.sequence_parallel else "-",
            "-" if layout.recompute == "nothing" else layout.recompute,
            *(f"{size / GB:.1f}" for size in (bill.total - bill.activations, bill.activations, bill.total)),
            f"{plan.time.total:.3g}",
            f"{plan.achieved.model / 1e12:.0f}",
            f"{plan.achieved.mfu:.0%}",
        )
    return grid


def footing(plan: "Plan") -> str:
    """Return lines that explain the columns, say how accurate the times are, and give the first row as a mesh."""
    best = plan.layout
    return (
        "tp, pp, dp: GPUs that share a layer, stages of the pipeline (4x2: with 2 chunks each), replicas. "
        "Micro batch: in sequences. Seq. par.: sequence parallelism. Recomp.: what backward computes again. GB: on the "
        "fullest GPU, weights, gradients and optimizer (state), activations, and their sum. MFU: the model's share of "
        "the GPUs' peak.\n"
        "How far to trust the times: on A100s, the formulas are within 10% of 28 published times, and 1% off on "
        "average (chapter 11). On other GPUs they are estimates, and 7% to 11% too fast for Megatron's published runs "
        "on H100s. Plans that differ by less than that are equally good, so try the first few.\n"
        f"The first as a mesh: init_device_mesh('cuda', ({best.dp}, {best.pp}, {best.tp}), "
        f"mesh_dim_names=('dp', 'pp', 'tp')), micro_batch={best.micro_batch}, micro_batches={best.steps}."
    )


def _config(options: argparse.Namespace) -> "GPTConfig":
    from dataclasses import replace

    from tplab.cluster import plan

    if options.seq is not None and options.seq < 1:
        raise Misuse(f"--seq {options.seq}: give at least 1 token")
    if options.model:
        known = plan.model(options.model)
        return replace(known, seq_length=options.seq) if options.seq else known
    return plan.gpt_shape(options.params, seq_length=options.seq or 4096)


def parameters(text: str) -> float:
    """Parse a number such as 70e9, 70B or 350M. Raises ArgumentTypeError for anything else."""
    try:
        return float(text.upper().replace("B", "E9").replace("M", "E6"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} isn't a number such as 70e9, 70B or 350M") from None
