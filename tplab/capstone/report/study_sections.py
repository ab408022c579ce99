"""The report sections that come from the study: memory, communication, timeline, scaling, layers, baseline."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from types import SimpleNamespace
from typing import Any

from tplab import viz
from tplab.capstone.own_layers.find import whose_is_what
from tplab.capstone.report.blocks import Block, Figure, Missing, grid
from tplab.capstone.report.run import Run
from tplab.capstone.report.sections import LAYERS, how, memory_is
from tplab.capstone.words import apart, listed, small
from tplab.common.units import count, duration, size
from tplab.course.chapters.ch11.published import SHOEYBI_FIGURE_5, SHOEYBI_TABLE_8

GPU_MEMORY = "the most that torch's allocator gave out"
IMPOSSIBLE = 1.1  # p ranks may be this many times faster than p times one rank, which has less cache
CPU_MEMORY = "the most that was live at once, counting every tensor of a step"


def memory(run: Run) -> Iterator[Block]:
    yield grid([{"rank": rank, memory_is(run): size(value)} for rank, value in enumerate(run.memory)])
    if not (found := run.measured.get("memory")):
        yield Missing("the memory of one step beside the predicted bill", how(run, "memory"))
        return
    predicted, peak = sum(found["bill"].values()), max(found["peak"])
    bars = {"the bill": found["bill"], "measured": {"all tensors": peak}}
    yield Figure("memory", viz.bill(bars), (
        f"The bill says {size(predicted)} for a rank; measured were {size(peak)}, {abs(peak / predicted - 1):.0%} "
        f"{'more' if peak > predicted else 'less'}: {GPU_MEMORY if run.device == 'cuda' else CPU_MEMORY}. "
        f"{found['note']}"
    ))  # fmt: skip
    if found["curve"]:
        meter = SimpleNamespace(curve=found["curve"], marks=[tuple(mark) for mark in found["marks"]], capacity=None)
        said = "Live tensors of rank 0 during one step: activations pile up in forward, and go in backward."
        yield Figure("live-memory", viz.live_memory(meter), said)


def communication(run: Run) -> Iterator[Block]:
    told = "Of a step's time the ranks spent in collectives, waiting for others included"
    if not run.communication:
        told = "Of the one step that was traced the ranks spent in collectives while they computed nothing"
    if shares := run.communication or run.exposed:
        yield f"{told}: {listed([f'rank {rank} {share:.0%}' for rank, share in enumerate(shares)])}."
    if not (found := run.measured.get("traffic")):
        yield Missing("the bytes of one step beside the formula", how(run, "traffic"))
        return
    if not found["parts"] and not found["measured"]:
        yield "One rank has nobody to talk to: nothing is sent."
        return
    rows, exact = [], True
    for kind in found["formula"] | found["measured"]:
        predicted, measured = found["formula"].get(kind, [0, 0]), found["measured"].get(kind, [0, 0])
        exact &= list(predicted) == list(measured)
        rows.append({
            "collective": kind, "calls, formula": f"{predicted[0]:,}", "calls, recorded": f"{measured[0]:,}",
            "bytes, formula": f"{predicted[1]:,}", "bytes, recorded": f"{measured[1]:,}",
        })  # fmt: skip
    verdict = "The formula and the record of one real step agree to the byte" if exact else "They differ"
    if not exact and run.settings.layers != "tplab":
        verdict += ", since the formula is that of tplab's layers and these are others"
    yield f"{verdict}. On {'rank 0' if run.settings.pp == 1 else 'the first rank of each stage'}:"
    yield grid(rows)
    yield grid([
        {"for": name, "collective": kind, "calls": f"{calls:,}", "bytes": f"{count:,}"}
        for name, kind, calls, count in found["parts"]
    ], folded="What each of them is for")  # fmt: skip


def timeline(run: Run) -> Iterator[Block]:
    if not (traces := run.traces):
        yield Missing("the timeline of one step", how(run, "timeline"))
        return
    length = max(trace.duration for trace in traces)
    hidden = [trace.hidden_share for trace in traces if trace.lane("communicate")]
    said = f"One step of {duration(length)}: solid where a rank computes, hatched where a collective is under way."
    if run.settings.pp > 1:
        said += " A message between stages counts only while a rank waits for it."
    elif hidden:
        shares = dict.fromkeys(f"{share:.0%}" for share in (min(hidden), max(hidden)))
        said += f" {' to '.join(shares)} of a rank's communication is hidden behind computation."
    yield Figure("timeline", viz.overlap({f"step {run.measured['timeline']['step']}": traces}), said)


def scaling(run: Run) -> Iterator[Block]:
    if not (found := run.measured.get("scaling")):
        yield Missing("step time on fewer ranks beside the cost model", how(run, "scaling"))
        return
    if len(found["strong"]) < 2:
        yield "One number of ranks was measured here, and a line needs two points."
        return
    strong, predicted = _by_ranks(found["strong"]), _by_ranks(found["predicted"]["strong"])
    first, last = min(strong), max(strong)
    times = strong[first] / strong[last]
    note, cores = found["note"], run.machine["cores"]
    if run.device == "cpu" and cores < last:
        note += f" Here {count(last, 'rank')} share {count(cores, 'core')}, so more ranks can't be faster."
    if times > last / first * IMPOSSIBLE:
        note += f" Careful: {count(last, 'rank')} can't be {times:.2f} times as fast as {_one(first)}. Something else "
        note += f"used the machine during some turns, so measure again: {how(run, 'scaling')}."
    if one := found.get("one_process"):
        note += _beside_threads(one, last, strong[last])
    yield note
    yield grid([
        {
            "ranks": p, "a step": duration(strong[p]), "turns": _range(found["rounds"][str(p)]),
            "cost model": duration(predicted[p]),
            "off": f"{predicted[p] / strong[p] - 1:+.0%}", "tokens/s": f"{found['tokens'] / strong[p]:,.0f}",
            "speed-up": f"{strong[first] / strong[p]:.2f}",
        }
        for p in strong
    ])  # fmt: skip
    bars = {}
    for p in strong:
        bars[f"{count(p, 'rank')}, measured"] = {"measured": strong[p]}
        bars[f"{count(p, 'rank')}, model"] = {name: part for name, part in found["parts"][str(p)].items() if part}
    yield Figure("step-time", viz.time_bars(bars), "Where the time goes, by the cost model, below what was measured.")
    lines = {
        "measured": {p: first * strong[first] / strong[p] for p in strong},
        "cost model": {p: first * predicted[first] / predicted[p] for p in predicted},
        "Megatron-LM 2019, table 8": SHOEYBI_TABLE_8,
    }
    faster = f"The same model on more ranks: {last} are {times:.2f} times as fast as {_one(first)}."
    yield Figure("strong-scaling", viz.scaling(lines, ylabel=_as_base("speed-up", first)), faster)
    weak = _rates(found, found["weak"])
    if len(weak) > 1:
        first, last = min(weak), max(weak)
        grown = {
            "measured": weak,
            "cost model": _rates(found, found["predicted"]["weak"]),
            "Megatron-LM 2019, figure 5": {row.tp: row.tp * row.efficiency for row in SHOEYBI_FIGURE_5},
        }
        more = (
            f"A model that grows with its ranks (layers here, layers and width in Megatron-LM): {last} ranks do "
            f"{weak[last] / first:.2f} times as much work in the same time as {_one(first)}."
        )
        ylabel = "FLOP/s of all, one rank = 1" if first == 1 else _as_base("FLOP/s of all", first)
        yield Figure("weak-scaling", viz.scaling(grown, ylabel=ylabel), more)


def _beside_threads(one: Mapping[str, Any], ranks: int, seconds: float) -> str:
    """Return sentences that compare the ranks with a single process that has all of their threads."""
    ratio, both = one["seconds"] / seconds, count(ranks, "rank")
    says = f" One process with {count(one['threads'], 'thread')} takes {duration(one['seconds'])} per step "
    says += f"({_range(one['rounds'])}), {ratio:.2f} times as long as {both}."
    if ratio < 1:
        says += (
            " Its threads share memory, so they have no messages to send. That is what communication costs: split a "
            "model over processes if one device is too small or too slow for it, not over the cores of one processor."
        )
    return says


def _range(seconds: Sequence[float]) -> str:
    return f"{duration(min(seconds))} to {duration(max(seconds))}"


def _one(count: int) -> str:
    return "one" if count == 1 else str(count)


def _as_base(what: str, first: int) -> str:
    """Return the axis label for a line that starts at `first` ranks with the value `first`."""
    return what if first == 1 else f"{what}, {first} ranks = {first}"


def layers(run: Run) -> Iterator[Block]:
    yield f"This run trained {LAYERS[run.settings.layers]}."
    whose, found = None, run.measured.get("layers", {})
    for start in run.starts:
        if (answers := start["answers"]) and answers["whose"] != whose:
            since = f"From step {start['step']:,} on: " if len(run.starts) > 1 else ""
            yield since + whose_is_what(**answers)
        whose = answers and answers["whose"]
    used = run.start["used"] or found.get("used")
    if used:
        yield grid(used, folded="What is from whom")
    if "losses" not in found:
        why = f": {found['why']}" if found else ""
        yield Missing(f"the learner's layers beside tplab's{why}", f"solve the chapters, then {how(run, 'layers')}")
        return
    mine, ours = found["losses"]["mine"], found["losses"]["tplab"]
    largest = apart(mine, ours)
    same = "are the same, bit for bit" if largest == 0 else f"differ by {small(largest)} at most"
    yield f"From the same first weights, the first {len(mine)} losses of both {same}:"
    yield grid(_losses({"the learner's": mine, "tplab's": ours}))


def baseline(run: Run) -> Iterator[Block]:
    found = run.measured.get("baseline", {})
    if "losses" not in found:
        why = f": {found['why']}" if found else ""
        yield Missing(f"the same model on torch's DTensor{why}", how(run, "baseline"))
        return
    losses = found["losses"]
    times = {name: median(values) for name, values in found["seconds"].items()}
    said = (
        f"The same GPT through `parallelize_module`: losses differ by {small(apart(*losses.values()))} at most over "
        f"{len(losses['tplab'])} steps, and a step of tplab's layers takes {times['tplab'] / times['dtensor']:.2f} "
        f"times as long as one of torch's. The runs took turns, {len(found['seconds']['tplab'])} each; these are the "
        "medians."
    )
    if run.settings.sequence_parallel:
        said += " Both were without sequence parallelism, other than the run itself."
    yield said
    yield grid([
        {"layers": name, "a step": duration(times[name]), "of all turns": _range(values)}
        for name, values in found["seconds"].items()
    ])  # fmt: skip
    yield grid(_losses(losses), folded="The losses of both")


def _losses(losses: Mapping[str, list[float]]) -> list[dict[str, Any]]:
    names = list(losses)
    count = min(len(values) for values in losses.values())
    shown = sorted({0, 1, 2, *range(4, count, 5), count - 1})
    return [
        {"step": step + 1, **{name: f"{losses[name][step]:.7f}" for name in names}} for step in shown if step < count
    ]


def _rates(found: Mapping[str, Any], times: Mapping[str, float]) -> dict[int, float]:
    """Return the total FLOP/s for each p, scaled so that the smallest p has the value p. The models grow with p."""
    work, took = _by_ranks(found["work"]), _by_ranks(times)
    first = min(took, default=1)
    return {p: first * work[p] / work[first] * took[first] / took[p] for p in took}


def _by_ranks(values: Mapping[str, float]) -> dict[int, float]:
    return {int(p): value for p, value in sorted(values.items(), key=lambda item: int(item[0]))}
