"""What a run brings back."""

from typing import Any

from tplab.runtime.records import Record


class Results(list[Any]):
    """What each rank returned, by rank.

    output:  what each rank printed, by rank
    record:  the collectives that the ranks entered
    times:   seconds since the launch began at which each rank's function had returned
    """

    def __init__(self, returned: list[Any], output: list[str], record: Record, times: list[float]) -> None:
        super().__init__(returned)
        self.output, self.record, self.times = output, record, times
