"""The report sections that come from the measurements of `tplab.capstone.study`."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from types import SimpleNamespace
from typing import Any

from tplab import viz
from tplab.capstone.own_layers.find import whose_is_what
from tplab.capstone.report.blocks import Block, Figure, Missing
from tplab.capstone.report.run import Run
from tplab.capstone.report.sections import LAYERS, memory_is
from tplab.capstone.words import apart, listed, small
from tplab.common.units import count, duration, size
from tplab.course.chapters.ch11.published import SHOEYBI_FIGURE_5, SHOEYBI_TABLE_8
from tplab.viz.table import Table

IMPOSSIBLE = 1.1  # a speedup may exceed the increase in ranks by this factor, because more ranks have more cache


def memory(run: Run) -> Iterator[Block | Missing]:
    yield viz.table([{"rank": rank, memory_is(run): size(value)} for rank, value in enumerate(run.memory)])
    if not (found := run.measured.get("memory")):
        yield Missing("a comparison of a step's memory with the formula", "`--only memory`")
        return
    predicted, peak = sum(found["bill"].values()), max(found["peak"])
    counted = " (as PyTorch's allocator counts them)" if run.device == "cuda" else ""
    note = "" if run.start["plan"] else found["note"]  # if there is a plan, its section has the note
    says = (
        f"The formula predicts {size(predicted)} per rank. The tensors of a real step{counted} peaked at {size(peak)}, "
        f"which is {abs(peak / predicted - 1):.0%} {'more' if peak > predicted else 'less'}. {note}"
    )
    yield Figure("memory", viz.bill({"predicted": found["bill"], "measured": {"all tensors": peak}}), says)
    if found["curve"]:
        meter = SimpleNamespace(curve=found["curve"], marks=found["marks"], capacity=None)
        says = (
            "The tensors alive on rank 0 during one step. Activations pile up during the forward pass and are freed "
            "during the backward pass."
        )
        yield Figure("live-memory", viz.live_memory(meter), says)


def communication(run: Run) -> Iterator[Block | Missing]:
    if shares := run.communication or run.exposed:
        says = "The ranks spent part of each step in collectives, including the time they waited for each other: "
        if not run.communication:
            says = "In the traced step, the ranks spent part of the time in collectives without computing anything: "
        yield says + listed([f"{share:.0%} on rank {rank}" for rank, share in enumerate(shares)]) + "."
    if not (found := run.measured.get("traffic")):
        yield Missing("a comparison of a step's traffic with the formula", "`--only traffic`")
        return
    formula, measured = found["formula"], found["measured"]
    if not formula and not measured:
        yield "A single rank doesn't send anything."
        return
    says = "In one real step, the ranks sent what the formula predicts, to the byte"
    if formula != measured:
        says = "In one real step, the ranks didn't send what the formula predicts"
        if run.settings.layers != "tplab":
            says += ". It's a formula for tplab's layers, and this run used different ones"
    ranks = "rank 0" if run.settings.pp == 1 else "the first rank of each pipeline stage"
    yield f"{says}. The table shows the traffic of {ranks}."
    totals = {kind: (*formula.get(kind, (0, 0)), *measured.get(kind, (0, 0))) for kind in formula | measured}
    yield viz.table([
        {
            "collective": kind, "calls predicted": f"{calls:,}", "calls": f"{real_calls:,}",
            "bytes predicted": f"{sent:,}", "bytes": f"{really_sent:,}",
        }
        for kind, (calls, sent, real_calls, really_sent) in totals.items()
    ])  # fmt: skip
    yield viz.table([
        {"purpose": name, "collective": kind, "calls": f"{calls:,}", "bytes": f"{sent:,}"}
        for name, kind, calls, sent in found["parts"]
    ], title="What the collectives are for")  # fmt: skip


def timeline(run: Run) -> Iterator[Block | Missing]:
    if not (traces := run.traces):
        yield Missing("the timeline of one step", "`--only timeline`")
        return
    says = f"This step took {duration(max(trace.duration for trace in traces))}. A rank computes in the solid parts. "
    says += "In the hatched parts, a collective is in progress."
    hidden = [trace.hidden_share for trace in traces if trace.lane("communicate")]
    if run.settings.pp > 1:
        says += " A message between two stages is only shown while a rank waits for it."
    elif hidden:
        shares = dict.fromkeys(f"{share:.0%}" for share in (min(hidden), max(hidden)))
        says += f" {' to '.join(shares)} of a rank's communication is hidden behind computation."
    yield Figure("timeline", viz.overlap({f"step {run.measured['timeline']['step']}": traces}), says)


def scaling(run: Run) -> Iterator[Block | Missing]:
    if not (found := run.measured.get("scaling")):
        yield Missing("step times on fewer ranks, compared with the cost model", "`--only scaling`")
        return
    if len(found["strong"]) < 2:
        yield "The study only measured one number of ranks, and a curve needs at least two."
        return
    strong, predicted = _by_ranks(found["strong"]), _by_ranks(found["predicted"]["strong"])
    first, last = min(strong), max(strong)
    ranks, times = count(last, "rank"), strong[first] / strong[last]
    faster = f"{times:.2f} times as fast as {count(first, 'rank')}"
    note, cores = found["note"], run.machine["cores"]
    if run.device == "cpu" and cores < last:
        note += f" Here, {ranks} share {count(cores, 'core')}, so additional ranks can't speed up a step."
    if times > last / first * IMPOSSIBLE:
        note += (
            f" Be careful with these numbers: {ranks} can't really be {faster}. Something else must have used the "
            "machine during some of the turns, so it's worth repeating them: "
            f"`python -m tplab.capstone study --folder {run.folder} --only scaling`."
        )
    if one := found.get("one_process"):
        note += _beside_threads(one, ranks, strong[last])
    yield note
    yield viz.table([
        {
            "ranks": p, "time per step": duration(seconds), "range of the turns": _range(found["rounds"][str(p)]),
            "cost model": duration(predicted[p]), "error": f"{predicted[p] / seconds - 1:+.0%}",
            "tokens/s": f"{found['tokens'] / seconds:,.0f}", "speedup": f"{strong[first] / seconds:.2f}",
        }
        for p, seconds in strong.items()
    ])  # fmt: skip
    bars = {}
    for p, seconds in strong.items():
        bars[f"{count(p, 'rank')}, measured"] = {"measured": seconds}
        bars[f"{count(p, 'rank')}, model"] = {name: part for name, part in found["parts"][str(p)].items() if part}
    says = "Measured step times, each with the cost model's prediction below it."
    yield Figure("step-time", viz.time_bars(bars), says)
    lines = {
        "measured": {p: first * strong[first] / seconds for p, seconds in strong.items()},
        "cost model": {p: first * predicted[first] / seconds for p, seconds in predicted.items()},
        "Megatron-LM 2019, table 8": SHOEYBI_TABLE_8,
    }
    base = "" if first == 1 else f", {first} ranks = {first}"  # where the measured line starts
    says = f"The same model on different numbers of ranks. {ranks} are {faster}."
    yield Figure("strong-scaling", viz.scaling(lines, ylabel=f"speedup{base}"), says)
    weak = _rates(found, found["weak"])
    if len(weak) > 1:
        first, last = min(weak), max(weak)
        lines = {
            "measured": weak,
            "cost model": _rates(found, found["predicted"]["weak"]),
            "Megatron-LM 2019, figure 5": {row.tp: row.tp * row.efficiency for row in SHOEYBI_FIGURE_5},
        }
        says = (
            "Models that grow with the number of ranks: ours get more layers, while Megatron-LM's get wider as well. "
            f"{last} ranks do {weak[last] / first:.2f} times as much work in the same time as {count(first, 'rank')}."
        )
        yield Figure("weak-scaling", viz.scaling(lines, ylabel=f"total FLOP/s{base or ', one rank = 1'}"), says)


def _beside_threads(one: Mapping[str, Any], ranks: str, seconds: float) -> str:
    """Return sentences that compare several ranks with a single process that has as many threads as all of them."""
    ratio = one["seconds"] / seconds
    says = f" A single process with {count(one['threads'], 'thread')} takes {duration(one['seconds'])} per step "
    says += f"({_range(one['rounds'])}), which is {ratio:.2f} times as long as {ranks}."
    if ratio < 1:
        says += (
            " Its threads work on the same tensors, so they don't have to exchange sums. That's the price of "
            "communication, and the reason to split a model only if one device is too small or too slow for it. "
            "Splitting it over the cores of a single processor doesn't pay."
        )
    return says


def _rates(found: Mapping[str, Any], times: Mapping[str, float]) -> dict[int, float]:
    """Return {p: total FLOP/s} for models that grow with p, scaled so that the value at the smallest p is that p."""
    work, took = _by_ranks(found["work"]), _by_ranks(times)
    first = min(took, default=1)
    return {p: first * work[p] / work[first] * took[first] / took[p] for p in took}


def _by_ranks(values: Mapping[str, float]) -> dict[int, float]:
    return dict(sorted((int(p), value) for p, value in values.items()))


def layers(run: Run) -> Iterator[Block | Missing]:
    whose, found = None, run.measured.get("layers", {})
    if run.settings.layers != "tplab" or "losses" in found:
        yield f"This run trained {LAYERS[run.settings.layers]}."
    for start in run.starts:
        if (answers := start["answers"]) and answers["whose"] != whose:
            since = f"Since step {start['step']:,}: " if len(run.starts) > 1 else ""
            yield since + whose_is_what(**answers)
        whose = answers and answers["whose"]
    if used := run.start["used"] or found.get("used"):
        yield viz.table(used, title="Where each part of the model comes from")
    if "losses" not in found:
        solve = found.get("why", "solve the exercises first")
        yield Missing("a comparison of your own layers with tplab's", f"{solve}, then `--only layers`")
        return
    mine, ours = found["losses"]["mine"], found["losses"]["tplab"]
    largest = apart(mine, ours)
    same = "are identical, bit for bit" if largest == 0 else f"differ by at most {small(largest)}"
    yield f"Starting from the same weights, the first {len(mine)} losses of both {same}."
    yield _losses({"the learner's": mine, "tplab's": ours})


def baseline(run: Run) -> Iterator[Block | Missing]:
    found = run.measured.get("baseline", {})
    if "losses" not in found:
        yield Missing("a comparison with PyTorch's DTensor", found.get("why", "`--only baseline`"))
        return
    losses, turns = found["losses"], found["seconds"]
    times = {name: median(values) for name, values in turns.items()}
    says = (
        "The same GPT was also trained with PyTorch's own `parallelize_module`. Over "
        f"{len(losses['tplab'])} steps, the losses differ by at most {small(apart(*losses.values()))}. A step with "
        f"tplab's layers takes {times['tplab'] / times['dtensor']:.2f} times as long as one with PyTorch's. They took "
        f"turns, and the times are medians of {count(len(turns['tplab']), 'turn')} each."
    )
    if run.settings.sequence_parallel:
        says += " Unlike the run itself, neither of them used sequence parallelism."
    yield says
    yield viz.table([
        {"layers": name, "time per step": duration(times[name]), "range of the turns": _range(values)}
        for name, values in turns.items()
    ])  # fmt: skip
    yield _losses(losses, title="The losses of both")


def _losses(losses: Mapping[str, list[float]], title: str = "") -> Table:
    last = len(next(iter(losses.values()))) - 1
    shown = [step for step in range(last + 1) if step in (0, 1, 2, last) or step % 5 == 4]
    rows = [{"step": step + 1} | {name: f"{values[step]:.7f}" for name, values in losses.items()} for step in shown]
    return viz.table(rows, title=title)


def _range(seconds: Sequence[float]) -> str:
    return f"{duration(min(seconds))} to {duration(max(seconds))}"
