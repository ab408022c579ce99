"""Chapter 14: three training jobs on rented machines, and what a layout would make of each of them.

    JOBS["70 billion"].play(tp=8, pp=4, dp=2, micro_batch_size=1, recompute="nothing").verdict

The bill says whether the layout fits into memory (chapter 00), and the cost model says how long a step takes (chapter
11). Nothing runs. To keep the game short, a job always splits the sequence as well if tp > 1, never interleaves its
stages, and gives every replica the full optimizer state.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, get_args

from tplab.cluster.plan import RESERVE, layouts, program_of
from tplab.cost.machines import MACHINES, Machine
from tplab.cost.step import StepTime, Throughput, achieved, step_time
from tplab.memory.config import PRESETS, GPTConfig, Recompute
from tplab.memory.memory_bill import Layout, bill

GB = 10**9
CLOSE = 1.05  # a layout has won if its step takes at most this many times as long as the fastest one's


# What is true of a layout that has won
DIVIDES = "the job can be divided like this"
FITS = "it fits into memory"
BUBBLE = "the pipeline doesn't wait too long"
SENDS = "the messages don't take too long"
AGAIN = "nothing is computed again without need"
BUSY = "the GPUs have enough to compute"

_REASONS = {  # for each part of a step's time; those that aren't here mean BUSY
    "pipeline bubble": BUBBLE, "tensor parallel": SENDS, "pipeline sends": SENDS, "data parallel": SENDS,
}  # fmt: skip


class Played(NamedTuple):
    """The outcome of a layout.

    fails       the requirement that it doesn't meet, one of the constants above, or "" if it has won
    verdict     the outcome in words, with numbers
    time, throughput    of a step, or None if the layout can't be used
    """

    fails: str
    verdict: str
    time: StepTime | None = None
    throughput: Throughput | None = None


@dataclass(frozen=True)
class Job:
    """A model to train on `gpus` GPUs, with `sequences` sequences per step."""

    config: GPTConfig
    gpus: int
    sequences: int
    machine: Machine = MACHINES["H100 DGX"]

    def layout(self, tp: int, pp: int, dp: int, micro_batch_size: int, recompute: Recompute) -> Layout:
        """Return the layout. Raises ValueError, with a sentence, if the job can't be divided like this."""
        config = self.config
        if tp * pp * dp != self.gpus:
            raise ValueError(f"tp · pp · dp = {tp} · {pp} · {dp} = {tp * pp * dp}, but there are {self.gpus} GPUs")
        for name, size, into, what in (
            ("tp", tp, config.num_heads, "heads"),
            ("tp", tp, config.seq_length, "tokens"),
            ("dp · micro_batch_size", dp * micro_batch_size, self.sequences, "sequences"),
        ):
            if into % size:
                raise ValueError(f"{into} {what} can't be divided by {name} = {size}")
        if pp > config.num_layers:
            raise ValueError(f"{pp} stages can't share {config.num_layers} layers")
        steps = self.sequences // (dp * micro_batch_size)
        return Layout(tp, pp, dp, micro_batch_size, steps, tp > 1, recompute)

    @cached_property
    def fastest(self) -> tuple[Layout, StepTime]:
        """The fastest layout that fits, with the time of a step."""
        found = [
            (layout, step_time(self.config, layout, self.machine, program_of()))
            for layout in layouts(self.config, self.gpus, self.sequences)
            if layout.chunks == 1 and layout.sequence_parallel == (layout.tp > 1) and not self.too_much(layout)
        ]
        return min(found, key=lambda pair: pair[1].total)

    def too_much(self, layout: Layout) -> str:
        """Return how much memory the layout lacks, and on which stage, or "" if it fits."""
        usable = self.machine.memory * (1 - RESERVE)
        needs = {stage: bill(self.config, layout, stage=stage).total for stage in (0, layout.pp - 1)}
        stage = max(needs, key=needs.__getitem__)
        where = "on each GPU" if layout.pp == 1 else "on the first stage" if stage == 0 else "on the last stage"
        return f"{(needs[stage] - usable) / GB:.1f} GB too much {where}" if needs[stage] > usable else ""

    def play(self, tp: int, pp: int, dp: int, micro_batch_size: int, recompute: Recompute) -> Played:
        """Return the outcome of a layout."""
        try:
            layout = self.layout(tp, pp, dp, micro_batch_size, recompute)
        except ValueError as error:
            return Played(DIVIDES, str(error))
        if said := self.too_much(layout):
            return Played(FITS, said)
        time, best = step_time(self.config, layout, self.machine, program_of()), self.fastest[1]
        reached = achieved(self.config, layout, self.machine, time.total)
        if time.total <= CLOSE * best.total:
            return Played("", f"a step takes {time.total:.3g} s", time, reached)
        why, what = _main_reason(time, best)
        lighter = [replace(layout, recompute=less) for less in get_args(Recompute) if less != recompute]
        twice = recompute == "layers" and what == "matmuls"  # the matmuls of every layer run again
        if why == BUSY and (twice or recompute != "nothing" and any(self._is_faster(other, time) for other in lighter)):
            why = AGAIN
        slower = f"a step takes {time.total / best.total:.2f} times as long as it could"
        return Played(
            why, f"{slower}, and {time.parts()[what] / time.total:.0%} of it is due to: {what}", time, reached
        )

    def _is_faster(self, layout: Layout, time: StepTime) -> bool:
        """Return True if a layout fits, and a step takes less time with it."""
        faster = step_time(self.config, layout, self.machine, program_of()).total < time.total
        return faster and not self.too_much(layout)


def _main_reason(time: StepTime, best: StepTime) -> tuple[str, str]:
    """Return the reason why a step takes longer than the fastest one, and the part of its time that has grown most."""
    more = {name: seconds - best.parts()[name] for name, seconds in time.parts().items()}
    what = max(more, key=more.__getitem__)
    return _REASONS.get(what, BUSY), what


_98_MILLION = GPTConfig(
    num_layers=8, hidden_size=768, num_heads=12, vocab_size=51_200, seq_length=2048, dropout=0.0, flash_attention=True
)
JOBS = {
    "98 million": Job(_98_MILLION, gpus=8, sequences=256),
    "70 billion": Job(PRESETS["Llama 3 70B"], gpus=64, sequences=512),
    "175 billion": Job(PRESETS["GPT-3 175B"], gpus=256, sequences=1536),
}
