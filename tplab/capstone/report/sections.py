"""The report sections that come from the run's log: five numbers, plan, machine, configuration, loss, speed, text."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from tplab import viz
from tplab.capstone.own_layers.find import MINE
from tplab.capstone.report.blocks import Block, Figure, Missing, Number, Sample, grid
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
NEAR = 0.25  # a step time that is further off the plan needs an explanation


def in_five_numbers(run: Run) -> Iterator[Block]:
    step, loss = run.evaluations[-1] if run.evaluations else run.losses[-1]
    where = f"loss on held-out text, step {step:,}" if run.evaluations else f"loss at step {step:,}"
    numbers = [
        Number(f"{loss:.3f}", "nats a token", where),
        Number(f"{run.tokens_per_second:,.0f}", "tokens/s", f"on {count(run.ranks, 'rank')}, median of the steps"),
    ]
    if share := utilisation(run):
        numbers.append(Number(f"{share[0]:.0%}", "utilisation", f"model FLOPs of a rank, of {share[1]}"))
    if waits := run.communication or run.exposed:
        numbers.append(Number(f"{max(waits):.0%}", "of a step", "the rank that waits most for collectives"))
    yield [*numbers, Number(size(max(run.memory)), "on a rank", memory_is(run))]
    yield _summary(run)


def utilisation(run: Run) -> tuple[float, str] | None:
    """Return the model FLOP/s as a share of what a device can do, and a description of the latter. None if unknown."""
    if not (machine := run.measured.get("machine")):
        return None
    done = model_flops(run.settings.model, run.settings.batch_size) / run.step_seconds / run.ranks
    if "peak" in machine:
        return done / machine["peak"], f"the {rate(machine['peak'])} that it has on paper"
    return done / machine["flops"], f"the {rate(machine['flops'])} that it reaches in large products"


def plan(run: Run) -> Iterator[Block]:
    """The step's time, memory and bytes, as `tplab.capstone.planning.plan` predicted them, and as they were."""
    if not (made := run.start.get("plan")):
        how = "start the run with `--plan`, which is the default"
        yield Missing("what the course's formulas predict for a step of this run", how)
        return
    seconds, memory = sum(made["seconds"].values()), sum(made["memory"].values())
    used = max(run.memory if run.device == "cuda" else run.recent[-1]["tensors"])
    sent = max(run.recent[-1]["sent"])
    ratio = run.step_seconds / seconds
    says = "Before the run started, its ranks measured the kernels of one layer, and the course's formulas predicted a "
    says += f"step from them. A step took {ratio:.2f} times as long as predicted"
    if ratio > 1 + NEAR:
        says += ", which is too long. Perhaps something else used the machine during the run. The prediction also "
        says += "leaves out what Python does between two kernels, which matters for small models"
    elif ratio < 1 - NEAR:
        says += ", so something else probably used the machine while the kernels were measured"
    if sent == made["sent"]:
        says += ". The ranks sent exactly as many bytes as predicted." if sent else ". One rank has nothing to send."
    else:
        says += f". The ranks sent {sent - made['sent']:+,} bytes compared with the prediction"
        other = run.settings.layers != "tplab"
        says += ", which is about tplab's layers, and these are others." if other else "."
    if not used:
        says += " Tensors weren't counted, because that doesn't work with `--compile`."
    yield f"{says} {made['note']}"
    rows = [
        ("a step", duration(seconds), duration(run.step_seconds), ratio),
        ("tensors on a rank, at most", size(memory), size(used), used / memory),
        ("bytes sent by a rank per step", f"{made['sent']:,}", f"{sent:,}", sent / (made["sent"] or 1)),
    ]
    yield grid([
        {"": what, "plan": planned, "run": measured, "run / plan": f"{off:.2f}"}
        for what, planned, measured, off in rows if off
    ])  # fmt: skip
    parts = {name: part for name, part in made["seconds"].items() if part}
    bars = {"the run": {"measured": run.step_seconds}, "the plan": parts}
    yield Figure("plan", viz.time_bars(bars), "Where the time of a step goes, by the plan, below what was measured.")


def machine(run: Run) -> Iterator[Block]:
    found, measured = run.machine, run.measured.get("machine")
    rows = {"GPU": f"{found['gpu']}, {found['gpus']} in this machine"} if found["gpu"] else {}
    rows |= {
        "processor": f"{found['processor']}, {found['cores']} cores",
        "memory": size(found["memory"]),
        "system": found["system"],
        "software": f"Python {found['python']}, torch {found['torch']}",
        "ranks": f"{run.ranks}, over {run.start['backend'] or 'no backend: one process'}",
    }
    if measured:
        rows["large products, a rank"] = f"{rate(measured['flops'])}, measured"
        rows["memory, a rank"] = f"{size(measured['bandwidth'])}/s read and written, measured"
        if measured.get("beta"):
            link = f"{duration(measured['alpha'])} + bytes / ({size(1 / measured['beta'])}/s), measured"
            rows["a message between ranks"] = link
    yield grid([{"part": name, "what": what} for name, what in rows.items()])
    if not measured:
        yield Missing("what this machine reaches in products, memory and messages", how(run, "machine"))


def configuration(run: Run) -> Iterator[Block]:
    values, defaults = asdict(run.settings), asdict(Settings())
    other = [name for name in values if values[name] != defaults[name]]
    rest = [{"setting": name, "value": _shown(values[name])} for name in values if name not in other]
    yield grid([
        {"setting": name, "here": _shown(values[name]), "default": _shown(defaults[name])} for name in other
    ]) if other else "Everything is as by default."  # fmt: skip
    yield grid(rest, folded=f"{len(rest)} settings that are as by default")


def loss(run: Run) -> Iterator[Block]:
    curve = Curve.of(run.losses)
    first, last = run.losses[0], run.losses[-1]
    steps = "steps" if len(run.steps) == run.done else "logged steps"
    each = "" if curve.every == 1 else f" Each point is the mean of {curve.every} {steps}."
    says = f"From {first[1]:.2f} nats a token at step {first[0]:,} to {last[1]:.2f} at step {last[0]:,}.{each}"
    if run.evaluations:
        at, held_out = run.evaluations[-1]
        near = [loss for step, loss in run.losses if at - 10 < step <= at] or [last[1]]
        says += f" The rings are the loss on held-out text. The last one is {held_out:.2f}, and the mean training loss "
        says += f"of the ten steps up to it is {sum(near) / len(near):.2f}."
    for start in run.starts:
        if changes := [f"{name} is {now} instead of {old}" for name, (old, now) in start["changes"].items()]:
            says += f" From step {start['step']:,} on, {listed(changes)}."
    yield Figure("loss", viz.training(curve.points, evaluations=run.evaluations), says)
    yield _one_rank(run)


def speed(run: Run) -> Iterator[Block]:
    yield grid([{
        "a step": duration(run.step_seconds),
        "tokens a step": f"{run.settings.tokens_per_step:,}",
        "tokens/s": f"{run.tokens_per_second:,.0f}",
        "FLOPs the model needs for it": work(model_flops(run.settings.model, run.settings.batch_size)),
    }])  # fmt: skip
    if share := utilisation(run):
        told = f"Model-FLOPs utilisation is {share[0]:.1%}: what the model needs, as a share of what a rank could do"
        yield f"{told}, {share[1]}."
    else:
        yield Missing("model-FLOPs utilisation, for which the machine has to be measured", how(run, "machine"))
    picture = viz.training(Curve.of(run.speeds).points, ylabel="tokens/s", from_zero=True)
    said = "Tokens a second over the run; a dip may be a step that shared the machine with something else."
    yield Figure("speed", picture, said)


def text(run: Run) -> Iterator[Block]:
    samples = [run.measured["before"] | {"step": 0}] if "before" in run.measured else []
    if not (samples := [*samples, *_few(run.samples)]):
        yield Missing("text that the model writes", "set `sample_every`, and the run goes on with samples")
        return
    yield (
        "How the model goes on from the same prompt, which is bold. Each token is drawn at random from the "
        f"{TOP_K} likeliest, at a temperature of {TEMPERATURE}."
    )
    for row in samples:
        yield Sample(row["step"], row["prompt"], visible(row["text"]))


def how(run: Run, part: str) -> str:
    """Return the command that measures a part."""
    return f"`python -m tplab.capstone study --folder {run.folder} --only {part}`"


def _one_rank(run: Run) -> Block:
    if run.ranks == 1:
        return "This run had one rank, so there is no other number of ranks to compare it with."
    if any(start["changes"].keys() - {"steps"} for start in run.starts):
        return "The way this run was trained has changed in between, so its losses can't be repeated on one rank."
    if not (alone := run.measured.get("alone")):
        return Missing(f"the loss of one rank beside that of {layout(run.settings)}", how(run, "alone"))
    count = len(alone["losses"])
    shared = [step for step in range(1, count + 1) if step in run.steps]
    if not shared:
        return f"One rank was trained for {count} steps, and the log of this run has none of them."
    here, there = [run.steps[step]["loss"] for step in shared], [alone["losses"][step - 1] for step in shared]
    which = f"the same {count} steps" if len(shared) == count else f"{len(shared)} logged steps among the first {count}"
    says = f"Of {which}, on one rank and on {run.ranks}, {_verdict(run.settings, apart(here, there))}"
    alone_is = "one rank" if run.settings.layers == "tplab" else "one rank, tplab's layers"
    difference = [a - b for a, b in zip(here, there, strict=True)]
    picture = viz.compared({alone_is: there, layout(run.settings): here}, difference, steps=shared)
    return Figure("one-rank", picture, says)


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
    settings, whose = run.settings, LAYERS[run.settings.layers]
    if (answers := run.start["answers"]) and (others := [one for one in answers["whose"].values() if one != MINE]):
        whose += f", but {len(others)} of their {len(answers['whose'])} answers are the course's solutions"
    text = (
        f"A {kind(settings)} of {large(run.start['parameters'])} parameters, {settings.num_layers} layers and hidden "
        f"size {settings.hidden_size}, {_cut(settings)}, has read {run.done * settings.tokens_per_step:,} tokens in "
        f"{run.done:,} steps of {settings.precision}. It is made of {whose}."
    )
    if settings.start_from is not None:
        text += f" It began with the weights in {settings.start_from}."
    if again := len(run.starts) - 1:
        at = [f"step {start['resumed_from']}" for start in run.starts[1:] if start["resumed_from"]]
        times = {1: "once", 2: "twice"}.get(again, f"{again} times")
        text += f" The run was resumed {times}" + (f", from {listed(at)}." if at else ".")
    if run.end is None or run.end["why"] != "done":
        text += f" It is not at its end: {settings.steps:,} steps are planned."
    return text


def _cut(settings: Settings) -> str:
    shared = [f"in pp = {settings.pp} stages"] if settings.pp > 1 else []
    shared += [f"shared by tp = {settings.tp} ranks"] if settings.tp > 1 else []
    shared = shared or ["whole on each rank"]
    if settings.dp > 1:
        shared.append(f"in dp = {settings.dp} replicas" + (f" with ZeRO-{settings.zero}" if settings.zero else ""))
    return ", ".join(shared)


def _few(rows: Sequence[dict[str, Any]], most: int = 4) -> Sequence[dict[str, Any]]:
    """Return at most `most` rows: the first, the last, and evenly spaced ones in between."""
    if len(rows) <= most:
        return rows
    return [rows[round(index * (len(rows) - 1) / (most - 1))] for index in range(most)]


def memory_is(run: Run) -> str:
    """Describe what the memory figures in the log measure."""
    return "peak of tensors on the GPU" if run.device == "cuda" else "resident set, with Python and torch"


def _shown(value: Any) -> str:
    return "none" if value is None else str(value).strip() or repr(value)
