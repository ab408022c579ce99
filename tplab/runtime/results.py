"""The results of a run."""

from typing import Any

from tplab.runtime.records import Record


class Results(list[Any]):
    """The values that the ranks returned, in rank order.

    output:  the text that each rank printed, in rank order
    record:  the collectives that the ranks entered
    spans:   when each rank's function started and returned, in seconds since the launch began
    """

    def __init__(
        self, returned: list[Any], output: list[str], record: Record, spans: list[tuple[float, float]]
    ) -> None:
        super().__init__(returned)
        self.output, self.record, self.spans = output, record, spans
