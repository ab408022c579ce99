"""Which item runs next, given the time that is left.

Items run in order of worth, each for at most its limit. An item starts only if at least half of its limit is left, so
at the end a later item that needs less time may run instead. If there is time left after the last item, the items that
need more than their limit continue.
"""

from collections.abc import Callable, Sequence

from benchmarks.gpu_check.items import Item
from benchmarks.gpu_check.results import Result, Results

Run = Callable[[Item, Result, float], None]


def work(items: Sequence[Item], results: Results, run: Run, now: Callable[[], float], until: float) -> None:
    """Run the items that aren't done until the clock `now` shows `until`.

    run     called as run(item, result, seconds): runs an item for at most so many seconds and completes its result
    """
    has_run = True
    while has_run:
        has_run = False
        for item in items:
            left, result = until - now(), results.items.get(item.name, Result())
            if not result.is_done and left >= item.limit / 2:
                has_run, results.items[item.name] = True, result
                run(item, result, min(item.limit, left))


def not_reached(items: Sequence[Item], results: Results) -> list[Item]:
    """Return the items that aren't done, in order of worth."""
    return [item for item in items if not results.items.get(item.name, Result()).is_done]
