"""The sections of a report. Each is a function that takes a `Run` and yields blocks, and `Missing` measurements."""

from collections.abc import Iterator
from dataclasses import asdict
from statistics import fmean, median

from tplab import viz
from tplab.capstone.own_layers.find import MINE, whose_is_what
from tplab.capstone.report.blocks import Block, Figure, Missing, Number, Sample
from tplab.capstone.report.run import Run
from tplab.capstone.settings.settings import Settings
from tplab.capstone.training.log import thinned
from tplab.capstone.training.step import TEMPERATURE, TOP_K
from tplab.capstone.words import apart, kind, layout, listed, small, visible
from tplab.common.units import count, duration, large, rate, size, work
from tplab.cost.flops import model_flops

LAYERS = {
    "tplab": "tplab's own layers",
    "mine": "the layers that the learner wrote in the chapters",
    "plain": "plain PyTorch layers without any parallelism",
}
ROUNDING = {"float64": 1e-9, "float32": 1e-3, "bfloat16": 0.05}  # how much the order of summation may change a loss
NEAR = 0.25  # if the relative error of the planned step time is larger, the report suggests why
SAMPLES = 4
IMPOSSIBLE = 1.1  # a speedup may exceed the increase in ranks by this factor, because more ranks have more cache


def at_a_glance(run: Run) -> Iterator[Block]:
    which, points = ("loss on held-out text", run.evaluations) if run.evaluations else ("training loss", run.losses)
    step, loss = points[-1]
    numbers = [
        Number(f"{loss:.3f}", "nats per token", f"{which} at step {step:,}"),
        Number(f"{run.tokens_per_second:,.0f}", "tokens/s", f"on {count(run.ranks, 'rank')}, median over the steps"),
    ]
    if share := _utilization(run):
        numbers.append(Number(f"{share[0]:.0%}", "utilization", f"of {share[1]}"))
    if shares := run.communication:
        numbers.append(Number(f"{max(shares):.0%}", "of a step", "in collectives, on the rank that spends most there"))
    memory = "peak memory of tensors on the GPU" if run.device == "cuda" else "resident memory, with Python and PyTorch"
    yield [*numbers, Number(size(max(run.memory)), "per rank", memory)]
    yield _summary(run)


def _summary(run: Run) -> str:
    settings, whose = run.settings, LAYERS[run.settings.layers]
    if (answers := run.start["answers"]) and (others := [one for one in answers["whose"].values() if one != MINE]):
        are = "comes" if len(others) == 1 else "come"
        whose += f", but {len(others)} of the {len(answers['whose'])} answers {are} from the course's solutions"
    says = (
        f"This {kind(settings)} has {large(run.start['parameters'])} parameters in "
        f"{count(settings.num_layers, 'layer')} with a hidden size of {settings.hidden_size}. "
        f"In {run.done:,} steps in {settings.precision}, the model has read "
        f"{run.done * settings.tokens_per_step:,} tokens. It uses {whose}."
    )
    if settings.start_from is not None:
        says += f" It started from the weights in {settings.start_from}."
    if again := len(run.starts) - 1:
        at = [f"step {step}" if (step := start["resumed_from"]) else "the beginning" for start in run.starts[1:]]
        says += f" The run was restarted {'once' if again == 1 else f'{again} times'}, from {listed(at)}."
    if run.end is None or run.end["why"] != "done":
        says += f" The run isn't finished yet, because {settings.steps:,} steps are planned."
    return says


def _utilization(run: Run) -> tuple[float, str] | None:
    """Return the model-FLOPs utilization and a description of the peak that it refers to, or None if it isn't known."""
    if not (machine := run.measured.get("machine")):
        return None
    done = model_flops(run.settings.model, run.settings.batch_size) / run.step_seconds / run.ranks
    if "peak" in machine:
        return done / machine["peak"], f"a GPU's published peak, {rate(machine['peak'])}"
    return done / machine["flops"], f"the {rate(machine['flops'])} that a rank reaches in large matmuls"


def plan(run: Run) -> Iterator[Block | Missing]:
    """Compare the measured time, memory and traffic of a step with the predictions in the run's plan."""
    if not (made := run.start["plan"]):
        yield Missing("the predicted time, memory and traffic of a step", "start a run with `--plan`, the default")
        return
    seconds, memory = sum(made["seconds"].values()), sum(made["memory"].values())
    used = max(run.memory if run.device == "cuda" else run.recent[-1]["tensors"])
    sent = max(run.recent[-1]["sent"])
    ratio, more = run.step_seconds / seconds, sent - made["sent"]
    says = (
        "Before the run started, its ranks timed the kernels of one layer, and the course's formulas turned these "
        f"times into a prediction for a full step. The real steps took {ratio:.2f} times as long as predicted."
    )
    if ratio > 1 + NEAR:
        says += " That's quite far off, so maybe something else was using the machine during the run. The prediction "
        says += "also ignores the time that Python spends between two kernels, which matters for small models."
    elif ratio < 1 - NEAR:
        says += " Something else was probably using the machine while the kernels were timed."
    if more:
        says += f" The ranks sent {abs(more):,} bytes {'more' if more > 0 else 'fewer'} than predicted."
        if run.settings.layers != "tplab":
            says += " The prediction is for tplab's layers, and this run used different ones."
    else:
        says += " The ranks sent exactly as many bytes as predicted." if sent else " A single rank has nothing to send."
    if not used:
        says += " With `--compile`, the tensors can't be counted."
    yield f"{says} {made['note']}"
    rows = [
        ("time per step", duration(seconds), duration(run.step_seconds), ratio),
        ("peak memory of tensors on a rank", size(memory), size(used), used / memory),
        ("bytes that a rank sends per step", f"{made['sent']:,}", f"{sent:,}", sent / (made["sent"] or 1)),
    ]
    yield viz.table([
        {"": what, "predicted": predicted, "measured": measured, "measured / predicted": f"{off:.2f}"}
        for what, predicted, measured, off in rows if off
    ])  # fmt: skip
    parts = {name: part for name, part in made["seconds"].items() if part}
    picture = viz.time_bars({"measured": {"measured": run.step_seconds}, "predicted": parts})
    yield Figure("plan", picture, "The measured time of a step, with a breakdown of the predicted time below it.")
    if used:
        picture = viz.bill({"measured": {"all tensors": used}, "predicted": made["memory"]})
        yield Figure("memory", picture, "The peak of all tensors on a rank, with the predicted memory below it.")


def machine(run: Run) -> Iterator[Block | Missing]:
    found, measured = run.machine, run.measured.get("machine")
    rows = {"GPU": f"{found['gpu']} ({found['gpus']} in this machine)"} if found["gpu"] else {}
    rows |= {
        "processor": f"{found['processor']}, {count(found['cores'], 'core')}",
        "memory": size(found["memory"]),
        "system": found["system"],
        "software": f"Python {found['python']}, PyTorch {found['torch']}",
        "ranks": f"{run.ranks}, using {run.start['backend']}" if run.start["backend"] else "a single process",
    }
    if run.start["shares_memory"]:
        rows["ranks"] += ", except for tensor-parallel all-reduces, which use shared memory"
    if measured:
        rows["matmuls"] = f"a rank reaches {rate(measured['flops'])} in large ones (measured)"
        rows["memory bandwidth"] = f"{size(measured['bandwidth'])}/s per rank, reading and writing (measured)"
        if measured.get("beta"):
            link = f"{duration(measured['alpha'])} + bytes / ({size(1 / measured['beta'])}/s) (measured)"
            rows["a message between ranks"] = f"takes {link}"
    else:
        yield Missing("the speed of this machine, and the model-FLOPs utilization", "`--only machine`")
    yield viz.table([{"component": name, "details": what} for name, what in rows.items()])


def settings(run: Run) -> Iterator[Block]:
    values, defaults = (
        {name: "none" if value is None else str(value).strip() or repr(value) for name, value in asdict(one).items()}
        for one in (run.settings, Settings())
    )
    rows = [{"setting": name, "this run": value, "default": defaults[name]} for name, value in values.items()]
    if other := [row for row in rows if row["this run"] != row["default"]]:
        yield viz.table(other)
    rest = [{"setting": row["setting"], "value": row["default"]} for row in rows if row not in other]
    yield viz.table(rest, title=f"The other {len(rest)} settings have their default values")


def loss(run: Run) -> Iterator[Block | Missing]:
    every, points = thinned(run.losses)
    (begin, first), (end, last) = run.losses[0], run.losses[-1]
    says = f"The training loss was {first:.2f} nats per token at step {begin:,} and {last:.2f} at step {end:,}."
    if every > 1:
        logged = "" if len(run.steps) == run.done else "logged "
        says += f" Each point of the curve is the mean of {every} {logged}steps."
    if run.evaluations:
        at, held_out = run.evaluations[-1]
        near = [loss for step, loss in run.losses if at - 10 < step <= at] or [last]
        says += f" The rings show the loss on held-out text. The last ring is at {held_out:.2f}, and the mean training "
        says += f"loss of the ten steps before it is {fmean(near):.2f}."
    for start in run.starts:
        if changes := [f"{name} changed from {old} to {now}" for name, (old, now) in start["changes"].items()]:
            says += f" At step {start['step']:,}, {listed(changes)}."
    yield Figure("loss", viz.training(points, evaluations=run.evaluations), says)
    if run.ranks > 1:
        yield _one_rank(run)


def _one_rank(run: Run) -> Block | Missing:
    if any(start["changes"].keys() - {"steps"} for start in run.starts):
        return "Because the settings changed during the run, a single rank can't reproduce its losses."
    if not (alone := run.measured.get("alone")):
        return Missing("a comparison with the losses of a single rank", "`--only alone`")
    losses = dict(enumerate(alone["losses"], 1))
    shared = [step for step in losses if step in run.steps]
    if not shared:
        return f"A single rank was trained for {len(losses)} steps, but the log of this run has none of them."
    here, there = [run.steps[step]["loss"] for step in shared], [losses[step] for step in shared]
    which = "" if len(shared) == len(losses) else f"{len(shared)} of "
    says = (
        f"For comparison, a single rank was trained in the same way. In {which}the first {len(losses)} steps, "
        f"{_verdict(run.settings, apart(here, there))} The lower plot shows the difference."
    )
    one_rank = "one rank" if run.settings.layers == "tplab" else "one rank, tplab's layers"
    difference = [a - b for a, b in zip(here, there, strict=True)]
    picture = viz.compared({one_rank: there, layout(run.settings): here}, difference, steps=shared)
    return Figure("one-rank", picture, says)


def _verdict(settings: Settings, largest: float) -> str:
    """Describe the largest difference between a single rank's losses and the run's, and what may have caused it."""
    bound = ROUNDING[settings.precision]
    if settings.dropout:
        return (
            f"the losses differ by at most {small(largest)}. With dropout = {settings.dropout:g}, several ranks draw "
            "different masks than a single rank would, so the curves are close to each other but not the same."
        )
    if largest > bound:
        return (
            f"the losses differ by up to {small(largest)}, which is more than rounding in {settings.precision} can "
            f"explain (about {bound:g}). Something else must be different."
        )
    return (
        f"the losses agree. They differ by at most {small(largest)}, because several ranks add up numbers in a "
        f"different order, and {settings.precision} rounds the sums differently."
    )


def speed(run: Run) -> Iterator[Block]:
    flops = work(model_flops(run.settings.model, run.settings.batch_size))
    says = f"A step takes {duration(run.step_seconds)} for {run.settings.tokens_per_step:,} tokens and {flops}."
    if share := _utilization(run):
        says += f" The model-FLOPs utilization is {share[0]:.1%}. It's the rate at which a rank computes the FLOPs "
        says += f"that the model needs, as a share of {share[1]}."
        if share[0] > 1:
            again = f"`python -m tplab.capstone study --folder {run.folder} --only machine` repeats that."
            says += " More than 100% is impossible, so something else must have used the machine while the matmuls "
            says += f"were measured. {again}"
    if shares := run.communication:
        says += " The ranks spent part of each step in collectives, including the time they waited for each other: "
        says += listed([f"{share:.0%} on rank {rank}" for rank, share in enumerate(shares)]) + "."
    yield says
    picture = viz.training(thinned(run.speeds)[1], ylabel="tokens/s", from_zero=True)
    says = "Tokens per second over the course of the run. A dip may mean that something else was using the machine."
    yield Figure("speed", picture, says)


def scaling(run: Run) -> Iterator[Block | Missing]:
    if not (found := run.measured.get("scaling")):
        yield Missing("step times on fewer ranks, compared with the cost model", "`--only scaling`")
        return
    turns = [turn | {"seconds": median(turn["rounds"])} for turn in found["turns"]]
    of_ranks = {turn["ranks"]: turn for turn in turns if turn["threads"] == turns[0]["threads"]}
    strong = {p: turn["seconds"] for p, turn in of_ranks.items()}
    first, last = min(strong), max(strong)
    ranks, times = count(last, "rank"), strong[first] / strong[last]
    faster = f"{times:.2f} times as fast as {count(first, 'rank')}"
    note = (
        f"The different numbers of ranks took turns of {count(found['steps'], 'step')}, "
        f"{len(turns[0]['rounds'])} times each. We took the median of each turn. The table shows the median, fastest "
        "and slowest of all turns. For the cost model (chapter 11), we timed the kernels of one layer while all of the "
        "ranks were busy."
    )
    note = " ".join([note, *found["notes"]])
    if run.device == "cpu" and run.machine["cores"] < last:
        cores = count(run.machine["cores"], "core")
        note += f" Here, {ranks} share {cores}, so additional ranks can't speed up a step."
    if times > last / first * IMPOSSIBLE:
        note += (
            f" Be careful with these numbers: {ranks} can't really be {faster}. Something else must have used the "
            "machine during some of the turns, so it's worth repeating them: "
            f"`python -m tplab.capstone study --folder {run.folder} --only scaling`."
        )
    yield note
    yield viz.table([
        {
            "ranks × threads": f"{turn['ranks']} × {turn['threads']}", "time per step": duration(turn["seconds"]),
            "range": f"{duration(min(turn['rounds']))} to {duration(max(turn['rounds']))}",
            "cost model": duration(turn["predicted"]), "error": f"{turn['predicted'] / turn['seconds'] - 1:+.0%}",
            "speedup": f"{strong[first] / turn['seconds']:.2f}",
        }
        for turn in turns
    ])  # fmt: skip
    if (alone := turns[-1]) not in of_ranks.values():
        yield _beside_threads(alone["threads"], alone["seconds"] / strong[last], ranks)
    if len(strong) < 2:
        yield "The study only measured one number of ranks, and a curve needs at least two."
        return
    lines = {"measured": strong, "cost model": {p: turn["predicted"] for p, turn in of_ranks.items()}}
    speedups = {name: {p: first * line[first] / line[p] for p in line} for name, line in lines.items()}
    base = "" if first == 1 else f", {first} ranks = {first}"  # where the lines start
    says = f"The same model on different numbers of ranks. {ranks} are {faster}."
    yield Figure("scaling", viz.scaling(speedups, ylabel=f"speedup{base}"), says)


def _beside_threads(threads: int, ratio: float, ranks: str) -> str:
    """Compare several ranks with a single process that has as many threads as all of them."""
    says = f"A step of a single process with {threads} threads takes {ratio:.2f} times as long as one of {ranks}."
    if ratio < 1:
        says += (
            " Its threads work on the same tensors, so they don't have to exchange sums. That's the price of "
            "communication, and the reason to split a model only if one device is too small or too slow for it. "
            "Splitting it over the cores of a single processor doesn't pay."
        )
    return says


def layers(run: Run) -> Iterator[Block]:
    whose = None
    for start in run.starts:
        if (answers := start["answers"]) and answers["whose"] != whose:
            since = f"Since step {start['step']:,}: " if len(run.starts) > 1 else ""
            yield since + whose_is_what(**answers)
        whose = answers and answers["whose"]


def text(run: Run) -> Iterator[Block | Missing]:
    rows = run.samples
    if len(rows) > SAMPLES:
        rows = [rows[round(index * (len(rows) - 1) / (SAMPLES - 1))] for index in range(SAMPLES)]
    if not rows:
        yield Missing("text that the model generates", "set `--sample-every` and resume the run")
        return
    yield (
        "The model continued the same prompt each time. Every token was drawn at random from the "
        f"{TOP_K} most likely ones, at a temperature of {TEMPERATURE}."
    )
    for row in rows:
        yield Sample(row["step"], visible(row["text"]))
