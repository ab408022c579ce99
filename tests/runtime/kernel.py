"""A real ipykernel to run cells in, as a notebook does."""

import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty

import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager

ANSI = re.compile(r"\x1b\[[0-9;]*m")


@dataclass
class Cell:
    """What a cell showed: its streams and displays as they stand at the end, and its error."""

    text: str = ""
    error: str = ""
    number: int = 0
    messages: list[dict] = field(default_factory=list)


class Notebook:
    def __init__(self, manager: KernelManager, client: BlockingKernelClient) -> None:
        self.manager, self.client = manager, client
        self._read: list[dict] = []  # the running cell's messages so far, where wait_until_shown has read them

    def start(self, source: str) -> str:
        """Begin to run a cell; returns the id of the request."""
        return self.client.execute(source)

    def finish(self, request: str, timeout: float = 120) -> Cell:
        """Wait for the cell that `start` began."""
        cell, displays = Cell(), {}
        end = time.monotonic() + timeout
        earlier, self._read = iter(self._read), []
        while True:
            try:
                message = next(earlier, None) or self.client.get_iopub_msg(timeout=max(0.1, end - time.monotonic()))
            except Empty:
                raise TimeoutError(f"the cell did not end within {timeout} s; so far it showed: {cell.text}") from None
            if message["parent_header"].get("msg_id") != request:
                continue
            kind, content = message["msg_type"], message["content"]
            cell.messages.append(message)
            if kind == "execute_input":
                cell.number = content["execution_count"]
            elif kind == "stream":
                cell.text += content["text"]
            elif kind in ("display_data", "update_display_data", "execute_result"):
                name = content.get("transient", {}).get("display_id") or len(cell.messages)
                displays[name] = content["data"].get("text/plain", "")
            elif kind == "error":
                cell.error = ANSI.sub("", "\n".join(content["traceback"]))
            elif kind == "status" and content["execution_state"] == "idle":
                cell.text += "".join(text + "\n" for text in displays.values() if text)
                return cell

    def run(self, source: str) -> Cell:
        return self.finish(self.start(source))

    def wait_until_shown(self, request: str, words: str) -> str:
        """Wait until the running cell has shown these words; returns all that it showed with them."""
        end = time.monotonic() + 120
        while time.monotonic() < end:
            message = self.client.get_iopub_msg(timeout=120)
            self._read.append(message)
            if message["parent_header"].get("msg_id") == request and words in str(message["content"]):
                return str(message["content"])
        raise TimeoutError(words)


@contextmanager
def notebook() -> Iterator[Notebook]:
    """A fresh kernel in which tplab, torch and torch.distributed are imported."""
    # Files instead of ports, since another process can take a port before the kernel does; /tmp, since a path is short
    folder = tempfile.mkdtemp(prefix="kernel-", dir="/tmp")
    manager = KernelManager(kernel_name="python3", transport="ipc", ip=os.path.join(folder, "socket"))
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    manager.start_kernel(env=environment)
    client = manager.blocking_client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=120)
        book = Notebook(manager, client)
        book.run("import os, time, tplab, torch\nimport torch.distributed as dist")
        yield book
    finally:
        client.stop_channels()
        if manager.has_kernel:
            manager.shutdown_kernel(now=True)
        shutil.rmtree(folder)


def opened(page: str | None, first: str = "", folder: Path | None = None) -> Iterator[Notebook]:
    """A kernel in `folder` as a page of this name in JupyterLab starts it, or without a page, as nbclient and nbval do.

    It has run the cell `first`, if there is one.
    """
    with pytest.MonkeyPatch.context() as patch:
        if folder:
            patch.chdir(folder)
        if page:
            patch.setenv("JPY_SESSION_NAME", page)
        else:
            patch.delenv("JPY_SESSION_NAME", raising=False)
        with notebook() as book:
            if first:
                book.run(first)
            yield book
