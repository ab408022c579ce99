"""The report sections that come from the run's log: five numbers, machine, configuration, loss, speed, text."""

from dataclasses import asdict
from typing import Any

from tplab import viz
from tplab.capstone.own_layers.find import MINE
from tplab.capstone.report.blocks import Block, Figure, Missing, Number, Numbers, Sample, Section, Words, grid
from tplab.capstone.report.run import Run
from tplab.capstone.settings.settings import Settings
from tplab.capstone.training.sample import TEMPERATURE, TOP_K
from tplab.capstone.watching.log_tail import Curve
from tplab.capstone.words import apart, kind, layout, listed, small, visible
from tplab.common.units import count, duration, large, rate, size, work
from tplab.cost.flops import model_flops

LAYERS = {
    "tplab": "tplab's own layers",
    "mine": "the layers that the learner wrote in the chapters",
    "dtensor": "torch's own tensor parallelism",
    "plain": "plain PyTorch, no parallelism",
}
ROUNDING = {"float64": 1e-9, "float32": 1e-3, "bfloat16": 0.05}  # how much the order of summation may change a loss


def in_five_numbers(run: Run) -> Section:
    last = run.losses[-1]
    held_out = run.evaluations[-1] if run.evaluations else None
    numbers = [Number(f"{last[1]:.3f}", "nats a token", f"loss at step {last[0]:,}")]
    if held_out is not None:
        numbers = [Number(f"{held_out[1]:.3f}", "nats a token", f"loss on held-out text, step {held_out[0]:,}")]
    numbers.append(
        Number(f"{run.tokens_per_second:,.0f}", "tokens/s", f"on {count(run.ranks, 'rank')}, median of the steps")
    )
    if share := utilisation(run):
        numbers.append(Number(f"{share[0]:.0%}", "utilisation", f"model FLOPs of a rank, of {share[1]}"))
    if waits := run.communication or run.exposed:
        numbers.append(Number(f"{max(waits):.0%}", "of a step", "the rank that waits most for collectives"))
    if run.memory:
        numbers.append(Number(size(max(run.memory)), "on a rank", memory_is(run)))
    return Section("The run in five numbers", [Numbers(numbers[:5]), Words(_summary(run))])


def utilisation(run: Run) -> tuple[float, str] | None:
    """Return the model FLOP/s as a share of what a device can do, and a description of the latter. None if unknown."""
    machine = run.measured.get("machine") or {}
    done = model_flops(run.settings.model, run.settings.batch_size) / run.step_seconds / run.ranks
    if machine.get("peak"):
        return done / machine["peak"], f"the {rate(machine['peak'])} that it has on paper"
    if machine.get("flops"):
        return done / machine["flops"], f"the {rate(machine['flops'])} that it reaches in large products"
    return None


def machine(run: Run) -> Section:
    found, measured = run.machine, run.measured.get("machine") or {}
    rows: list[tuple[str, str]] = []
    if found.get("gpu"):
        rows.append(("GPU", f"{found['gpu']}, {found.get('gpus', 1)} in this machine"))
    rows.append(("processor", f"{found.get('processor', 'unknown')}, {found.get('cores', '?')} cores"))
    if found.get("memory"):
        rows.append(("memory", size(found["memory"])))
    rows.append(("system", str(found.get("system", "unknown"))))
    rows.append(("software", f"Python {found.get('python', '?')}, torch {found.get('torch', '?')}"))
    rows.append(("ranks", f"{run.ranks}, over {run.start.get('backend') or 'no backend: one process'}"))
    blocks: list[Block] = []
    if measured:
        rows.append(("large products, a rank", f"{rate(measured['flops'])}, measured"))
        rows.append(("memory, a rank", f"{size(measured['bandwidth'])}/s read and written, measured"))
        if measured.get("beta"):
            link = f"{duration(measured['alpha'])} + bytes / ({size(1 / measured['beta'])}/s), measured"
            rows.append(("a message between ranks", link))
    else:
        blocks.append(Missing("what this machine reaches in products, memory and messages", how(run, "machine")))
    return Section("The machine", [grid([{"part": name, "what": what} for name, what in rows]), *blocks])


def configuration(run: Run) -> Section:
    values, defaults = asdict(run.settings), asdict(Settings())
    other = [name for name in values if values[name] != defaults[name]]
    changed = [{"setting": name, "here": _shown(values[name]), "default": _shown(defaults[name])} for name in other]
    rest = [{"setting": name, "value": _shown(values[name])} for name in values if name not in other]
    blocks: list[Block] = [grid(changed)] if changed else [Words("Everything is as by default.")]
    return Section("The configuration", [*blocks, grid(rest, folded=f"{len(rest)} settings that are as by default")])


def loss(run: Run) -> Section:
    curve = Curve()
    for step, value in run.losses:
        curve.add(step, value)
    first, last = run.losses[0], run.losses[-1]
    steps = "steps" if len(run.steps) == run.done else "logged steps"
    each = "" if curve.every == 1 else f" Each point is the mean of {curve.every} {steps}."
    says = f"From {first[1]:.2f} nats a token at step {first[0]:,} to {last[1]:.2f} at step {last[0]:,}.{each}"
    if run.evaluations:
        at, held_out = run.evaluations[-1]
        says += (
            f" The rings are the loss on held-out text. The last one is {held_out:.2f}, and the mean training loss of "
        )
        says += f"the ten steps up to it is {_around(run, at):.2f}."
    for start in run.starts:
        changes = [f"{name} is {now} instead of {old}" for name, (old, now) in (start.get("changes") or {}).items()]
        if changes:
            says += f" From step {start['step']:,} on, {listed(changes)}."
    blocks: list[Block] = [Figure("loss", viz.training(curve.points, evaluations=run.evaluations), says)]
    blocks += _one_rank(run)
    return Section("Loss", blocks)


def speed(run: Run) -> Section:
    curve = Curve()
    for step, value in run.speeds:
        curve.add(step, value)
    row = {
        "a step": duration(run.step_seconds),
        "tokens a step": f"{run.settings.tokens_per_step:,}",
        "tokens/s": f"{run.tokens_per_second:,.0f}",
        "FLOPs the model needs for it": work(model_flops(run.settings.model, run.settings.batch_size)),
    }
    blocks: list[Block] = [grid([row])]
    share = utilisation(run)
    if share:
        told = f"Model-FLOPs utilisation is {share[0]:.1%}: what the model needs, as a share of what a rank could do"
        blocks.append(Words(f"{told}, {share[1]}."))
    else:
        blocks.append(Missing("model-FLOPs utilisation, for which the machine has to be measured", how(run, "machine")))
    if curve.points:
        said = "Tokens a second over the run; a dip may be a step that shared the machine with something else."
        blocks.append(Figure("speed", viz.training(curve.points, ylabel="tokens/s", from_zero=True), said))
    return Section("Speed", blocks)


def text(run: Run) -> Section:
    blocks: list[Block] = []
    if before := run.measured.get("before"):
        blocks.append(_sample(before, 0))
    blocks += [_sample(row, row["step"]) for row in _few(run.samples)]
    if not blocks:
        blocks.append(Missing("text that the model writes", "set `sample_every`, and the run goes on with samples"))
    else:
        intro = (
            "How the model goes on from the same prompt, which is bold. Each token is drawn at random from the "
            f"{TOP_K} likeliest, at a temperature of {TEMPERATURE}."
        )
        blocks.insert(0, Words(intro))
    return Section("The text it writes", blocks)


def how(run: Run, part: str) -> str:
    """Return the command that measures a part."""
    return f"`python -m tplab.capstone study --folder {run.folder} --only {part}`"


def _one_rank(run: Run) -> list[Block]:
    alone = run.measured.get("alone")
    if run.ranks == 1:
        return [Words("This run had one rank, so there is no other number of ranks to compare it with.")]
    if any(set(start.get("changes") or ()) - {"steps"} for start in run.starts):
        told = "The way this run was trained has changed in between, so its losses can't be repeated on one rank."
        return [Words(told)]
    if not alone:
        return [Missing(f"the loss of one rank beside that of {layout(run.settings)}", how(run, "alone"))]
    steps, count = run.steps, len(alone["losses"])
    shared = [step for step in range(1, count + 1) if step in steps]
    if not shared:
        return [Words(f"One rank was trained for {count} steps, and the log of this run has none of them.")]
    here, there = [steps[step]["loss"] for step in shared], [alone["losses"][step - 1] for step in shared]
    difference = [a - b for a, b in zip(here, there, strict=True)]
    name = layout(run.settings)
    which = f"the same {count} steps" if len(shared) == count else f"{len(shared)} logged steps among the first {count}"
    says = f"Of {which}, on one rank and on {run.ranks}, {_verdict(run.settings, apart(here, there))}"
    alone_is = "one rank" if run.settings.layers == "tplab" else "one rank, tplab's layers"
    return [Figure("one-rank", viz.compared({alone_is: there, name: here}, difference, steps=shared), says)]


def _verdict(settings: Settings, largest: float) -> str:
    """A sentence about the largest difference between the losses of one rank and of several."""
    if settings.dropout:
        return (
            f"the losses are at most {small(largest)} apart. With dropout = {settings.dropout:g} the ranks draw other "
            "masks than one rank alone, so the curves lie near each other and not on each other. Below, the difference."
        )
    bound = ROUNDING[settings.precision]
    if largest > bound:
        return (
            f"the losses are up to {small(largest)} apart, which is more than rounding in {settings.precision} "
            f"explains (about {bound:g} at most): something else differs between the two. Below, the difference."
        )
    return (
        f"the losses lie on each other: at most {small(largest)} apart. Below, the difference, which is the order of "
        f"additions in {settings.precision}."
    )


def _summary(run: Run) -> str:
    settings, whose = run.settings, LAYERS.get(run.settings.layers, run.settings.layers)
    answers = run.start.get("answers")
    if answers and (others := [one for one in answers["whose"].values() if one != MINE]):
        whose += f", but {len(others)} of their {len(answers['whose'])} answers are the course's solutions"
    parameters = run.start.get("parameters")
    size_of = f"{large(parameters)} parameters, " if parameters else ""
    seen = run.done * settings.tokens_per_step
    text = (
        f"A {kind(settings)} of {size_of}{settings.num_layers} layers and hidden size {settings.hidden_size}, "
        f"{_cut(settings)}, has read {seen:,} tokens in {run.done:,} steps of {settings.precision}. It is made of "
        f"{whose}."
    )
    if settings.start_from is not None:
        text += f" It began with the weights in {settings.start_from}."
    if len(run.starts) > 1:
        at = [f"step {start.get('resumed_from')}" for start in run.starts[1:] if start.get("resumed_from")]
        times = {1: "once", 2: "twice"}.get(len(run.starts) - 1, f"{len(run.starts) - 1} times")
        text += f" The run was resumed {times}" + (f", from {listed(at)}." if at else ".")
    if run.end is None or run.end.get("why") != "done":
        text += f" It is not at its end: {settings.steps:,} steps are planned."
    return text


def _cut(settings: Settings) -> str:
    shared = [f"in pp = {settings.pp} stages"] if settings.pp > 1 else []
    shared += [f"shared by tp = {settings.tp} ranks"] if settings.tp > 1 else []
    shared = shared or ["whole on each rank"]
    if settings.dp > 1:
        shared.append(f"in dp = {settings.dp} replicas" + (f" with ZeRO-{settings.zero}" if settings.zero else ""))
    return ", ".join(shared)


def _around(run: Run, step: int, width: int = 10) -> float:
    near = [row["loss"] for at, row in run.steps.items() if step - width < at <= step]
    return sum(near) / len(near) if near else run.losses[-1][1]


def _few(rows: list[dict[str, Any]], most: int = 4) -> list[dict[str, Any]]:
    """Return at most `most` rows: the first, the last, and evenly spaced ones in between."""
    if len(rows) <= most:
        return rows
    return [rows[round(index * (len(rows) - 1) / (most - 1))] for index in range(most)]


def _sample(row: dict[str, Any], step: int) -> Sample:
    return Sample(step, row["prompt"], visible(row["text"]))


def memory_is(run: Run) -> str:
    """Describe what the memory figures in the log measure."""
    return "peak of tensors on the GPU" if run.device == "cuda" else "resident set, with Python and torch"


def _shown(value: Any) -> str:
    return "none" if value is None else str(value).strip() or repr(value)
