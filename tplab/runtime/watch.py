"""Watch over running ranks from the parent process until all have returned or something goes wrong."""

import contextlib
import os
import selectors
import signal
import time
from collections.abc import Sequence
from multiprocessing.connection import Pipe
from typing import Any

from tplab.runtime import transport
from tplab.runtime.board import Board
from tplab.runtime.diagnosis import (
    advice,
    deadlocked,
    explain,
    lost_messages,
    skipped_groups,
    snapshot,
    unmatched_messages,
)
from tplab.runtime.display import Output
from tplab.runtime.failures import (
    SHOWN_REPORTS,
    Deadlock,
    Interrupted,
    RankError,
    describe_exit,
    different_batches,
    format_chain,
    innermost_user_frame,
    lost_connection,
    parse_stack,
    place,
    rank_names,
    split_message,
)
from tplab.runtime.forkserver import ForkServer, read_status
from tplab.runtime.liveview import LiveView, look
from tplab.runtime.records import Record, Results

POLL_SECONDS = 0.1
SETTLED_SECONDS = 0.5  # how long a deadlock must last without any change to count as one
LATE_SECONDS = 5.0  # how long a message may take after its sender has returned
GRACE_SECONDS = 0.15  # how long to wait after the first failure, because other ranks may be about to report theirs
CAUSE_SECONDS = 10.0  # how long to wait, after an error that another rank must have caused, for that rank's report
STACK_SECONDS = 3.0  # how long the ranks may take to report where they are
STACK_REST_SECONDS = 0.05  # how long to wait for the rest of a stack whose first part has arrived
ASK_SECONDS = 1.0  # how long to wait before the ranks are asked about their threads again
LAST_OUTPUT_SECONDS = 2.0
START_SECONDS = 120.0  # how long the ranks may take to start. NCCL is slow to start, so this isn't part of the timeout


class RankProcess:
    """The process of a rank and its pipes. `Watch` reads them.

    message:  the rank's final message: ("result", ...), ("error", ...) or ("mismatch",); None until it arrives
    status:   exit status of the process (negative: signal number); None while it's alive
    can_act:  whether any of its threads can still make progress; None until it answers
    crash:    the Python stack that faulthandler wrote, either on request or in a crash
    """

    def __init__(self, rank: int, server: ForkServer, shared: tuple[int, ...]) -> None:
        self.rank = rank
        self.message: tuple[Any, ...] | None = None
        self.status: int | None = None
        self.can_act: bool | None = None
        self.crash = bytearray()
        self.pid: int | None = None
        self.control, theirs = Pipe()
        self.output, output = os.pipe()
        self.stack, stack = os.pipe()
        try:
            self.exit = server.fork([theirs.fileno(), output, stack, *shared])
        except BaseException:
            self._close_pipes()
            raise
        finally:
            theirs.close()
            os.close(output)
            os.close(stack)
        self.control.send_bytes(rank.to_bytes(4, "little"))

    @property
    def alive(self) -> bool:
        return self.status is None

    def ask_for_stack(self) -> None:
        """Have faulthandler write the rank's stack to the `stack` pipe. Works even if the rank is stuck in C++."""
        self.crash.clear()
        if self.pid is not None and self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGUSR1)

    def ask_for_threads(self) -> None:
        """Ask the rank what its threads are doing. It can't answer while a call holds the global interpreter lock."""
        self.can_act = None
        if self.alive:
            with contextlib.suppress(OSError):
                self.control.send_bytes(b"threads")

    def kill(self) -> None:
        """Kill the rank and every process that it has started."""
        if self.pid is None:
            self.pid = read_status(self.exit)  # the fork itself may still be under way
        if self.pid is not None and self.alive:
            for end in (os.killpg, os.kill):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    end(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Wait until the process is gone, then close its descriptors."""
        if self.alive and self.pid is not None:
            self.status = read_status(self.exit)
        os.close(self.exit)
        self._close_pipes()

    def _close_pipes(self) -> None:
        self.control.close()
        os.close(self.output)
        os.close(self.stack)


class Watch:
    def __init__(self, ranks: Sequence[RankProcess], board: Board, output: Output) -> None:
        self.ranks, self.board, self.output = ranks, board, output
        self.view = LiveView(lambda: look(board, [rank.rank for rank in ranks if not rank.alive]))
        self._ask_again_at = 0.0
        self.selector = selectors.DefaultSelector()
        for rank in ranks:
            for kind, source in (
                ("output", rank.output),
                ("stack", rank.stack),
                ("message", rank.control),
                ("exit", rank.exit),
            ):
                self.selector.register(source, selectors.EVENT_READ, (rank, kind))

    # Reading

    def poll(self, seconds: float) -> None:
        """Read what the ranks have sent. Waits at most `seconds` for the first data."""
        for key, _ in self.selector.select(seconds):
            rank, kind = key.data
            if kind == "message":
                self._read_message(rank)
            elif kind == "exit":
                self._read_exit(rank)
            else:
                data = os.read(key.fd, 1 << 16)
                if not data:
                    self.selector.unregister(key.fileobj)
                elif kind == "output":
                    self.output.write(rank.rank, data)
                else:
                    rank.crash += data
        self.output.refresh()
        self.view.refresh()

    def _read_message(self, rank: RankProcess) -> None:
        try:
            data = rank.control.recv_bytes()
        except (EOFError, OSError):
            self.selector.unregister(rank.control)
            return
        try:
            message = transport.loads(data)
            if message[0] == "threads":
                rank.can_act = message[1]
            else:
                rank.message = message
        except Exception as error:
            text = f"TypeError: what rank {rank.rank} returned can't be read in this process: {error!r}\n"
            rank.message = ("error", [(text, [])])

    def _read_exit(self, rank: RankProcess) -> None:
        number = read_status(rank.exit)
        if rank.pid is None and number is not None:
            rank.pid = number
            return
        rank.status = number if number is not None else -9  # None: the fork server itself was killed
        self.selector.unregister(rank.exit)

    def _poll_until(self, done: Any, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not done() and (left := end - time.monotonic()) > 0:
            self.poll(min(POLL_SECONDS, left))

    # The run

    def until_done(self, timeout: float | None) -> Results:
        began = settled = time.monotonic()
        started: float | None = None
        before: object = None
        try:
            while True:
                self.poll(POLL_SECONDS)
                if any(not rank.alive or rank.message and rank.message[0] != "result" for rank in self.ranks):
                    raise self._failure()
                if all(rank.message for rank in self.ranks):
                    if wrong := skipped_groups(self.board):
                        raise RankError(wrong, cause_type="RuntimeError", cause_message=wrong)
                    return self._results()
                now = time.monotonic()
                progress = self._progress()
                if progress != before:
                    before, settled = progress, now
                elif now - settled > SETTLED_SECONDS and self._is_deadlocked(before):
                    raise self._deadlock("the ranks are waiting for something that will never happen")
                elif now - settled > LATE_SECONDS and lost_messages(snapshot(self.board)):
                    raise self._deadlock("a message was lost")
                if started is None and all(self.board.state(rank.rank) != "starting" for rank in self.ranks):
                    started = now
                if started is None and now - began > START_SECONDS:
                    raise self._not_started()
                if timeout is not None and started is not None and now - started > timeout:
                    raise self._out_of_time(timeout)
        except KeyboardInterrupt:
            raise Interrupted("the run was interrupted. Where the ranks were:\n" + self._explain()) from None

    def _is_deadlocked(self, progress: object) -> bool:
        """Return True if some ranks are deadlocked and no rank has moved while their states were read one by one.

        A rank that waits in one thread may continue in another, so the ranks are asked about their threads.
        """
        states = snapshot(self.board)
        if not (stuck := deadlocked(states)) or time.monotonic() < self._ask_again_at:
            return False
        waiting = [rank for rank in self.ranks if states[rank.rank].waits]
        asked = [rank for rank in waiting if rank.rank in stuck]
        for rank in asked:
            rank.ask_for_threads()
        self._poll_until(lambda: all(rank.can_act is not None or not rank.alive for rank in asked), STACK_SECONDS)
        can_act = [rank.rank for rank in waiting if rank.can_act]
        self._ask_again_at = time.monotonic() + ASK_SECONDS
        return bool(deadlocked(states, can_act)) and self._progress() == progress

    def _progress(self) -> object:
        """Return a value that changes whenever a rank makes progress."""
        return [
            (self.board.state(r.rank), self.board.entered(r.rank), self.board.waits(r.rank), self.output.size(r.rank))
            for r in self.ranks
        ]

    def _results(self) -> Results:
        messages = [rank.message for rank in self.ranks if rank.message]
        collectives = [collective for message in messages for collective in message[3]]
        spans = [message[2] for message in messages]
        return Results([message[1] for message in messages], self.output.texts(), Record(collectives), spans)

    def imported(self) -> list[str]:
        """Return the names of the modules that the ranks had to import, without duplicates."""
        return list(dict.fromkeys(module for rank in self.ranks if rank.message for module in rank.message[4]))

    def close(self) -> None:
        """Read and show the remaining output, then stop reading. The ranks are dead by now."""
        self.view.close()
        self._poll_until(lambda: not self.selector.get_map(), LAST_OUTPUT_SECONDS)
        self.output.close()
        self.selector.close()

    # What went wrong

    def _explain(self) -> str:
        for rank in self.ranks:
            rank.ask_for_stack()
        self._poll_until(lambda: all(rank.crash or not rank.alive for rank in self.ranks), STACK_SECONDS)
        self._poll_until(lambda: False, STACK_REST_SECONDS)
        stacks = {rank.rank: innermost_user_frame(parse_stack(bytes(rank.crash))) for rank in self.ranks}
        states = snapshot(self.board, ended=[rank.rank for rank in self.ranks if not rank.alive])
        return explain(states, {rank: frame for rank, frame in stacks.items() if frame})

    def _deadlock(self, why: str) -> Deadlock:
        return Deadlock(f"{why}:\n{self._explain()}\n{advice(snapshot(self.board))}")

    def _out_of_time(self, timeout: float) -> RankError:
        report = (
            f"not finished after {timeout:g} s (timeout={timeout:g}). Where the ranks were:\n{self._explain()}\n"
            "If the run only needs longer, give launch a larger timeout."
        )
        states = snapshot(self.board)
        kind = Deadlock if any(state.waits for state in states) else RankError
        return kind(report, cause_type="timeout")

    def _not_started(self) -> RankError:
        return RankError(
            f"not all ranks have started within {START_SECONDS:g} s. Where the ranks were:\n{self._explain()}\n"
            "`python -m tplab doctor` tries a launch and says what is wrong on this machine.",
            cause_type="timeout",
        )

    def _failure(self) -> RankError:
        self._poll_until(lambda: False, GRACE_SECONDS)
        self._poll_until(lambda: not self._lacks_its_cause(), CAUSE_SECONDS)
        if any(rank.message == ("mismatch",) for rank in self.ranks):
            return Deadlock(f"{self._explain()}\n{advice(snapshot(self.board))}")
        dead = [rank for rank in self.ranks if not rank.alive and not rank.message]
        if words := self._words_about_batches():
            return Deadlock(
                f"two ranks can't connect, because their messages to each other don't match:\n{self._explain()}\n"
                f"{advice(snapshot(self.board))} (NCCL calls this {words!r}.)"
            )
        raised = [rank for rank in self.ranks if rank.message and rank.message[0] == "error"]
        if dead:  # then an error that only reports a lost connection adds nothing
            raised = [rank for rank in raised if rank.message and not lost_connection(rank.message[1][-1][0])]
        first = dead[0] if dead else raised[0]
        parts = []
        reports = self._group_reports(dead, raised)
        for text, numbers in list(reports.items())[:SHOWN_REPORTS]:
            parts.append(f"{rank_names(numbers)} {text}")
        if others := [rank for numbers in list(reports.values())[SHOWN_REPORTS:] for rank in numbers]:
            parts.append(f"{rank_names(others)} failed, too, each in its own way.")
        if len(dead) + len(raised) < len(self.ranks):
            parts.append("Where the ranks were:\n" + self._explain())
        status = first.status or 0
        ended = ("exit" if status >= 0 else "signal"), describe_exit(status)
        kind, message = split_message(first.message[1]) if first.message else ended
        return RankError("\n\n".join(parts), first.rank, kind, message)

    def _words_about_batches(self) -> str | None:
        """Return NCCL's words if a rank failed because another rank's batch of messages doesn't match its own."""
        errors = [rank.message[1][-1][0] for rank in self.ranks if rank.message and rank.message[0] == "error"]
        words = next(filter(None, map(different_batches, errors)), None)
        return words if unmatched_messages(snapshot(self.board)) else None

    def _lacks_its_cause(self) -> bool:
        """Return True if all reported errors are lost connections and the rank that caused them isn't known yet."""
        told = [rank.message for rank in self.ranks if rank.message and rank.message[0] != "result"]
        lost = all(message[0] == "error" and lost_connection(message[1][-1][0]) for message in told)
        return lost and all(rank.alive or rank.message for rank in self.ranks)

    def _group_reports(self, dead: list[RankProcess], raised: list[RankProcess]) -> dict[str, list[int]]:
        """Return a dict that maps each failure report to the list of failed ranks that it describes."""
        reports: dict[str, list[int]] = {}
        for rank in dead:
            where = innermost_user_frame(parse_stack(bytes(rank.crash)))
            at = f",\n  at {place(where)}" if where else ""
            reports.setdefault(describe_exit(rank.status or 0) + at, []).append(rank.rank)
        for rank in raised:
            assert rank.message is not None
            reports.setdefault("failed:\n" + format_chain(rank.message[1]), []).append(rank.rank)
        return reports
