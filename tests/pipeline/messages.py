"""How many messages and bytes each rank of a schedule sends, counted from the schedule alone."""

from tplab.runtime.records import Total


def traffic(schedule, message_bytes):
    """The messages and bytes that each rank sends, if every message has `message_bytes` bytes."""
    totals = []
    for rank, row in enumerate(schedule.actions):
        results = [schedule.gives(rank, action) for action in row]
        calls = sum(result is not None and schedule.receiver(result) != rank for result in results)
        totals.append(Total(calls, calls * message_bytes))
    return totals
