"""The sections of a report. Each is a function that takes a `Run` and yields HTML."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch

from tplab.capstone.own_layers.find import MINE
from tplab.capstone.planning.traffic import step_parts
from tplab.capstone.report import elements as html
from tplab.capstone.report.elements import Bar, Number, Part
from tplab.capstone.report.run import Run
from tplab.capstone.settings.settings import Settings
from tplab.capstone.training.trainer import TEMPERATURE, TOP_K
from tplab.capstone.words import apart, chapters, kind, layout, small, visible
from tplab.common.units import count, duration, large, size
from tplab.cost.flops import model_flops
from tplab.course.learn.my_tp import BLOCKS, FOR_A_GPT, chapters_of
from tplab.course.notebooks.numbering import chapter_of

ROUNDING = {"float64": 1e-9, "float32": 1e-3, "bfloat16": 0.05}  # how much the order of summation may change a loss
NEAR = 0.25  # if the relative error of the planned step time is larger, the report suggests why
TIMES = ("matmuls", "element-wise", "communication", "optimizer")
MEMORY = ("weights", "activations", "gradients", "optimizer state")  # in the same colors as the times


def mine_of(run: Run) -> dict[str, int]:
    """Return the exercises whose answers are the learner's own, with their lines of code."""
    answers = run.start["answers"] or {"whose": {}}
    return {exercise: answers["lines"][exercise] for exercise, whose in answers["whose"].items() if whose == MINE}


def summary(run: Run) -> Iterator[str]:
    settings, mine = run.settings, mine_of(run)
    yield html.paragraph(_lead(run), "lead")
    says = (
        f"It's a {kind(settings)} with {large(run.start['parameters'])} parameters in "
        f"{count(settings.num_layers, 'layer')}. In {count(run.done, 'step')}, it has read "
        f"{large(run.done * settings.tokens_per_step)} tokens of {_text(settings)}."
    )
    if again := len(run.starts) - 1:
        says += f" The run was interrupted {'once' if again == 1 else f'{again} times'} and went on."
    yield html.paragraph(says, "soft")
    which, (_, loss) = ("held-out text", run.evaluations[-1]) if run.evaluations else ("its text", _losses(run)[-1])
    found = [Number(f"{sum(mine.values()):,}", "lines of my own code")] if mine else []
    found += [
        Number(f"{loss:.2f}", f"nats per token, the loss on {which}"),
        Number(f"{settings.tokens_per_step / run.step_seconds:,.0f}", f"tokens per second, on {_ranks(run)}"),
    ]
    if sent := max(run.recent[-1]["sent"]):
        found.append(Number(size(sent), "sent by each rank, per step"))
    if run.machine["peak"] and settings.precision == "bfloat16":
        share = model_flops(settings.model, settings.batch_size) / run.step_seconds / run.ranks / run.machine["peak"]
        found.append(Number(f"{share:.0%}", "model FLOPs utilization"))
    yield html.numbers(found)


def _lead(run: Run) -> str:
    settings, mine = run.settings, mine_of(run)
    answers, lines = run.start["answers"], count(sum(mine.values()), "line")
    by, partly = f" by the layers that {chapters(chapters_of(FOR_A_GPT[:-1]))} build", ""
    if answers and len(mine) == len(answers["whose"]):
        by = f" by {lines} of my own code, from {chapters(chapters_of(mine))}"
    elif mine:
        partly = f" {len(mine)} of the {len(answers['whose'])} answers behind it are my own, with {lines} of code from "
        by, partly = "", f"{partly}{chapters(chapters_of(mine))}."
    if settings.tp > 1:
        says = f"Every matrix multiplication in this model is split over {settings.tp} {_ranks(run, '')}{by}."
    else:
        says = "This model isn't split over ranks." + (f" It's computed{by}." if by else "")
    says += partly
    if settings.pp > 1:
        says += f" Its layers are spread over {settings.pp} stages."
    if settings.dp > 1:
        says += f" {settings.dp} replicas share every batch."
    return says


def text(run: Run) -> Iterator[str]:
    if not run.samples:
        return
    *earlier, last = run.samples
    begins = f", if the text begins with “{last['prompt']}”" if last["prompt"].strip() else ""
    yield html.paragraph(f"This is what it writes after {count(last['step'], 'step')}{begins}:")
    yield html.text_block(visible(last["text"]))
    if earlier:
        samples = [html.paragraph(f"After {count(row['step'], 'step')}:") for row in earlier]
        blocks = [html.text_block(visible(row["text"])) for row in earlier]
        how = f"Every token is drawn from the {TOP_K} most likely ones, at a temperature of {TEMPERATURE}."
        both = [part for pair in zip(samples, blocks, strict=True) for part in pair]
        yield html.folded("What it wrote before", html.paragraph(how), *both)


def loss(run: Run) -> Iterator[str]:
    points = _losses(run)
    says = f"The loss falls from {points[0][1]:.2f} to {points[-1][1]:.2f} nats per token."
    if run.evaluations:
        says += f" On held-out text, the loss is {run.evaluations[-1][1]:.2f}."
    lines, here = {_ranks(run): points}, run.settings
    alone = dict(enumerate(run.measured.get("alone", []), 1))
    if (shared := [step for step, _ in points if step in alone]) and run.ranks > 1:
        lines["one rank"] = list(alone.items())
        largest = apart([run.steps[step]["loss"] for step in shared], [alone[step] for step in shared])
        says += f" For comparison, the same model was trained on a single rank for {count(len(alone), 'step')}. "
        if largest <= ROUNDING[here.precision]:
            says += f"The losses agree: they differ by at most {small(largest)}, which is rounding error."
        elif here.dropout:
            says += f"The losses differ by at most {small(largest)}, because the ranks draw different dropout masks."
        else:
            says += f"The losses differ by up to {small(largest)}, which is more than rounding in {here.precision}."
    yield html.paragraph(says)
    yield html.curves(lines, {"held-out text": run.evaluations} if run.evaluations else {}, f"The loss curve. {says}")


def split(run: Run) -> Iterator[str]:
    settings, answers = run.settings, run.start["answers"]

    def block(name: str, *ways: str) -> Part:
        chapter = f"chapter {chapter_of(BLOCKS[name])}"
        if answers:
            chapter += ", my code" if answers["whose"][BLOCKS[name]] == MINE else ", the course's solution"
        sends = [f"{sent[way]} {way.rpartition(' ')[2]}" for way in ways if way in sent]
        return Part(name, settings.tp > 1, chapter, ", ".join(sends))

    sent = _sent(run)
    norm, residual = Part("norm"), Part("+ residual")
    first = [block("embedding", "embedding forward")] + [Part("+ positions")] * settings.learned_positions
    layer = [norm, block("attention", "layer forward", "layer backward"), residual]
    layer += [norm, block("MLP", "layer forward", "layer backward"), residual]
    last = [norm, block("logits", "logits forward", "logits backward"), block("loss", "loss forward")]
    if settings.tp > 1:
        yield html.paragraph(
            "Each rank has its own color, and gray blocks are identical on every rank. The byte counts are for the "
            "messages of one rank per micro-batch."
        )
    yield html.split(first, layer, settings.num_layers, last, settings.tp)


def _sent(run: Run) -> dict[str, str]:
    """Return the bytes of a micro-batch's tensor-parallel messages, per block: {"embedding forward": "131 kB"}."""
    settings = run.settings
    if settings.pp > 1:
        return {}
    parts, blocks = step_parts(settings, torch.device(run.device)), 2 * settings.num_layers
    wanted = {
        "embedding forward": ("embedding, forward", 1), "layer forward": ("layers, forward", blocks),
        "layer backward": ("layers, backward", blocks), "logits forward": ("output layer, forward", 1),
        "logits backward": ("output layer, backward", 1), "loss forward": ("loss", 1),
    }  # fmt: skip
    found = {
        block: sum(part.bytes for part in parts if part.name == name) // (settings.micro_batches * times)
        for block, (name, times) in wanted.items()
    }
    return {block: size(total) for block, total in found.items() if total}


def plan(run: Run) -> Iterator[str]:
    """Compare the measured time, memory and traffic of a step with the predictions in the run's plan."""
    if not (made := run.start["plan"]):
        return
    seconds, memory = sum(made["seconds"].values()), sum(made["memory"].values())
    ratio, sent = run.step_seconds / seconds, max(run.recent[-1]["sent"])
    says = (
        "Before the run, the ranks timed the kernels of one layer. From these times, the formulas of chapters 00 and "
        f"11 predict the time of a step. A step actually took {ratio:.2f} times as long as predicted."
    )
    if not 1 - NEAR <= ratio <= 1 + NEAR:
        says += " That's far off. Something else may have used the machine, either during the timing or during the run."
    if sent:
        more = sent - made["sent"]
        says += f" Each rank sent {sent:,} bytes per step, "
        says += f"{abs(more):,} {'more' if more > 0 else 'fewer'} than predicted." if more else "exactly as predicted."
        if more and run.settings.layers != "tplab":
            says += " The prediction is for the course's layers."
    yield html.paragraph(says)
    parts = made["seconds"]
    yield html.paragraph("The time of a step:", "soft")
    yield html.bars(
        [
            Bar("predicted", duration(seconds), [(name, parts.get(name, 0)) for name in TIMES]),
            Bar("measured", duration(run.step_seconds), [("", run.step_seconds)]),
        ],
        TIMES,
    )
    if run.memory:
        yield html.paragraph("The memory of all tensors on a rank, at the peak:", "soft")
        predicted = [(name, made["memory"].get(name, 0)) for name in MEMORY]
        bars = [Bar("predicted", size(memory), predicted), Bar("measured", size(run.memory), [("", run.memory)])]
        yield html.bars(bars, MEMORY)
    if turns := run.measured.get("scaling", {}).get("turns"):
        yield from _scaling(run, turns)


def _scaling(run: Run, turns: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield html.paragraph("The time of a step on fewer ranks, as the median of several turns:", "soft")
    bars = []
    for turn in turns:
        ranks, measured = count(turn["ranks"], "rank"), median(turn["rounds"])
        if parts := turn["predicted"]:
            said = duration(sum(parts.values()))
            bars.append(Bar(f"{ranks}, predicted", said, [(name, parts.get(name, 0)) for name in TIMES]))
        bars.append(Bar(f"{ranks}, measured", duration(measured), [("", measured)]))
    yield html.bars(bars, TIMES)
    few, all_of_them = (count(turn["ranks"], "rank") for turn in (turns[0], turns[-1]))
    ratio = median(turns[-1]["rounds"]) / median(turns[0]["rounds"])
    says = f"A step on {all_of_them} takes {ratio:.2f} times as long as on {few}."
    if ratio > 1 and run.device == "cpu":
        says += " Here, the ranks share a processor and its memory, so there's little to gain from splitting a model "
        says += "that fits on one rank. Splitting pays off if a model is too large or too slow for one device."
    if len(turns) > 1:
        yield html.paragraph(says)


def tables(run: Run) -> Iterator[str]:
    if run.communication:
        yield html.paragraph(f"The rank that waits most spends {run.communication:.0%} of its time in collectives.")
    if made := run.start["plan"]:
        parts = [(f"time: {name}", duration(value)) for name, value in made["seconds"].items() if value]
        parts += [(f"memory: {name}", size(value)) for name, value in made["memory"].items() if value]
        rows = [{"a step on a rank": name, "predicted": value} for name, value in parts]
        yield html.folded("The prediction in numbers", html.table(rows), html.paragraph(made["note"]))
    yield html.folded("Machine", html.table([{"part": name, "details": what} for name, what in _machine(run).items()]))
    values, defaults = (
        {name: "none" if value is None else _name(str(value)) or repr(value) for name, value in asdict(one).items()}
        for one in (run.settings, Settings())
    )
    changed = [{"setting": name, "value": value} for name, value in values.items() if value != defaults[name]]
    yield html.folded("Settings that differ from the defaults", html.table(changed))


def _machine(run: Run) -> dict[str, str]:
    found = run.machine
    rows = {"GPU": f"{found['gpu']} ({found['gpus']} in this machine)"} if found["gpu"] else {}
    rows |= {
        "processor": f"{found['processor']}, {count(found['cores'], 'core')}", "memory": size(found["memory"]),
        "system": found["system"], "software": f"Python {found['python']}, PyTorch {found['torch']}",
        "layout": f"{layout(run.settings)}, over {run.start['backend'] or 'a single process'}",
    }  # fmt: skip
    if run.start["shares_memory"]:
        rows["layout"] += ", and shared memory for tensor-parallel all-reduces"
    return rows


def _losses(run: Run) -> list[tuple[int, float]]:
    return [(step, row["loss"]) for step, row in run.steps.items()]


def _ranks(run: Run, number: str | None = None) -> str:
    """Return "2 ranks" or "2 GPUs", or only the second word if `number` is empty."""
    words = count(run.ranks if number is None else 2, "rank" if run.device == "cpu" else "GPU")
    return words if number is None else words.partition(" ")[2]


def _text(settings: Settings) -> str:
    return "the source code of Python's standard library" if settings.data is None else _name(settings.data)


def _name(path: str) -> str:
    """Return a path without the folders above the last two, if it's an absolute one."""
    return str(Path(*Path(path).parts[-2:])) if path.startswith("/") else path.strip()
