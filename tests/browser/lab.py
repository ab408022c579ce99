"""Pieces of a browser test: start JupyterLab as `make lab` does, open a notebook in Chromium, act as a learner acts.

    with browser() as chromium, lab_server(folder) as server:
        lab = Lab(chromium, server)
        with lab.notebook("04_parallel_linear.ipynb") as page:
            page.write("exercise-4-1", answer)
            page.run("check-4-1")
            assert "passed" in page.output("check-4-1").inner_text()

Loading JupyterLab takes six seconds of CPU time, so a window stays, and notebooks are opened in it one after the other.
Cells are named by the ids that they have in the notebook's file. Nothing but the server on loopback can be reached
from the page; what it tried is in `page.refused`.
"""

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import nbformat
from playwright.sync_api import BrowserContext, Locator, Page, Request, sync_playwright
from playwright.sync_api import Error as PlaywrightError
from playwright.sync_api import TimeoutError as PlaywrightTimeout

from tests import ROOT
from tplab.course.learn.course_files import MARKER, MEMORY

PATIENCE = 600  # seconds for anything; the machine may be busy
CHROMIUMS = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
MAC_CHROME = "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"
FIRST, SECOND = "browser 1", "browser 2"  # the processes that run tests with a browser: each starts a JupyterLab
LIGHT, DARK = "JupyterLab Light", "JupyterLab Dark"

# In JupyterLab's page: choose a theme, open a notebook, say whether its kernel has nothing to do, and close all
CHOOSE = """async theme => {
    await jupyterapp.restored;
    await jupyterapp.commands.execute("apputils:change-theme", {theme});
}"""
OPEN = """async path => {
    await jupyterapp.commands.execute("docmanager:open", {path, factory: "Notebook"});
}"""  # without its result, which can't leave the page
IS_IDLE = """path => {
    const context = jupyterapp.shell.currentWidget?.context;
    const waiting = [...document.querySelectorAll(".jp-Notebook .jp-InputPrompt")]
        .some(prompt => prompt.textContent.includes("[*]"));
    return context?.path === path && context.sessionContext.session?.kernel?.status === "idle" && !waiting;
}"""
CLOSE = """async () => {
    for (const notebook of [...jupyterapp.shell.widgets("main")].filter(widget => widget.context)) {
        await notebook.context.sessionContext.shutdown();
        notebook.context.model.dirty = false; // otherwise, it would ask whether to save
        notebook.close();
    }
}"""

# The user's settings under which a page can be tested: every cell is in the page.
SETTINGS = {
    "@jupyterlab/notebook-extension/tracker": {"windowingMode": "none", "autoStartDefaultKernel": True},
}


@dataclass(frozen=True)
class Server:
    """A running JupyterLab."""

    folder: Path
    port: int
    token: str
    pid: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"


def chromium_path() -> str | None:
    """The Chromium or Chrome of this machine."""
    found = [os.environ.get("CHROMIUM"), *map(shutil.which, CHROMIUMS), MAC_CHROME]
    return next((path for path in found if path and Path(path).exists()), None)


@contextmanager
def lab_server(folder: Path) -> Iterator[Server]:
    """`make lab` on `folder`, with settings and kernels of its own; ended with everything that it started.

    The folder becomes a learner's: the chapters that it lacks are put beside what is there.
    """
    home = folder / ".lab"
    (folder / MEMORY).mkdir(exist_ok=True)
    (folder / MEMORY / MARKER).write_text("{}")
    for name, values in SETTINGS.items():
        path = home / "settings" / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values))
    port, token = _free_port(), secrets.token_hex(16)
    with open(home / "lab.log", "w+b") as log:
        process = subprocess.Popen(
            _make_lab(folder, port), cwd=ROOT, env=_environment(home, token), stdin=subprocess.DEVNULL,
            stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            server = Server(folder, port, token, process.pid)
            _wait_until_up(server, process, home / "lab.log")
            yield server
        finally:
            _stop(process)


def _make_lab(folder: Path, port: int) -> list[str]:
    """`make lab` in the environment that runs the tests; `-o` tells make that it is installed."""
    options = f"--root={folder} --no-browser --ServerApp.port={port} --ServerApp.port_retries=0"
    options += " --LabApp.expose_app_in_browser=True"  # as window.jupyterapp
    return ["make", "-o", f"{sys.prefix}/.installed", "lab", f"VENV={sys.prefix}", f"LAB_ARGS={options}"]


def _environment(home: Path, token: str) -> dict[str, str]:
    folders = {
        "JUPYTER_CONFIG_DIR": "config",
        "JUPYTER_DATA_DIR": "data",
        "JUPYTER_RUNTIME_DIR": "runtime",
        "JUPYTERLAB_SETTINGS_DIR": "settings",
        "JUPYTERLAB_WORKSPACES_DIR": "workspaces",
        "IPYTHONDIR": "ipython",
    }
    environment = dict(os.environ, PYTHONPATH=str(ROOT), JUPYTER_TOKEN=token)
    for name in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "PYTEST_CURRENT_TEST"):
        environment.pop(name, None)
    return environment | {name: str(home / folder) for name, folder in folders.items()}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait_until_up(server: Server, process: subprocess.Popen, log: Path) -> None:
    request = urllib.request.Request(f"{server.url}api/status", headers={"Authorization": f"token {server.token}"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end and process.poll() is None:
        with suppress(OSError, urllib.error.URLError):
            opener.open(request, timeout=5).close()
            return
        time.sleep(0.2)
    raise RuntimeError(f"JupyterLab did not come up:\n{log.read_text(errors='replace')}")


def _stop(process: subprocess.Popen) -> None:
    for end in (signal.SIGTERM, signal.SIGKILL):  # on SIGTERM the server ends its kernels first
        with suppress(ProcessLookupError):
            os.killpg(process.pid, end)
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
            return


@contextmanager
def browser() -> Iterator[BrowserContext]:
    """A headless Chromium that talks to nobody on its own account. Its pages share what was loaded of JupyterLab."""
    quiet = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-sync"]
    quiet += ["--disable-background-networking", "--disable-component-update", "--disable-quic"]
    quiet += ["--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]  # (a route would switch off the cache)
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=chromium_path(), headless=True, args=quiet)
        try:
            context = chromium.new_context()
            context.set_default_timeout(PATIENCE * 1000)
            yield context
        finally:
            chromium.close()


class Lab:
    """A window of JupyterLab, in which one notebook after the other is opened."""

    def __init__(self, chromium: BrowserContext, server: Server) -> None:
        self.chromium, self.server = chromium, server
        self._window: Page | None = None

    @contextmanager
    def notebook(self, path: str, theme: str = LIGHT, *, width: int = 1280) -> Iterator["NotebookPage"]:
        """Open a notebook, with its kernel running. Afterwards, it's closed without being saved, and its kernel ended.

        path: relative to the server's folder
        """
        window = self._window or self.chromium.new_page()
        self._window = None  # if something goes wrong, the next notebook gets another window
        try:
            window.set_viewport_size({"width": width, "height": 1000})
            page = NotebookPage(window, self.server, path, theme)
            yield page
            window.evaluate(CLOSE)
            page.forget()
            self._window = window
        finally:
            if self._window is None:
                with suppress(PlaywrightError):  # the kernel should end in any case
                    window.evaluate(CLOSE)
                window.close()


def choose_theme(window: Page, theme: str) -> None:
    """Show JupyterLab in this theme, also in the windows that are opened later."""
    window.wait_for_function("window.jupyterapp !== undefined")
    window.evaluate(CHOOSE, theme)
    window.locator(f"body[data-jp-theme-name='{theme}']").wait_for(state="attached")


class NotebookPage:
    """A notebook that is open in JupyterLab, with its kernel running."""

    def __init__(self, window: Page, server: Server, path: str, theme: str) -> None:
        self.page, self.server, self.path, self.file = window, server, path, server.folder / path
        self.ids = [cell["id"] for cell in nbformat.read(self.file, as_version=4).cells]
        self.refused: list[str] = []  # what the page asked for beyond the server
        self.errors: list[str] = []  # what went wrong in the page
        self._listeners = {"request": self._note, "pageerror": lambda error: self.errors.append(str(error))}
        for event, listener in self._listeners.items():
            window.on(event, listener)
        if window.url == "about:blank":
            self.load()
        else:
            window.evaluate(OPEN, path)
        self.wait_until_ready()
        choose_theme(window, theme)

    def forget(self) -> None:
        """Note no more of what happens in the window."""
        for event, listener in self._listeners.items():
            self.page.remove_listener(event, listener)

    def load(self) -> None:
        """Load JupyterLab with this notebook, as on the next day."""
        # /doc: this document, no side bars
        self.page.goto(f"{self.server.url}doc/tree/{self.path}?token={self.server.token}")

    def wait_until_ready(self) -> None:
        """Wait until the kernel is ready. If it isn't after four minutes, load the page again, as a learner would.

        JupyterLab once never showed the first notebook of a new server as idle; 100 attempts didn't bring it back.
        """
        for patience in (240, PATIENCE):
            if patience == PATIENCE:
                self.load()
            with suppress(PlaywrightTimeout):
                self.page.wait_for_selector(".jp-NotebookPanel .jp-Cell", timeout=patience * 1000)
                self.page.wait_for_function(IS_IDLE, arg=self.path, timeout=patience * 1000, polling=200)
                return
        log = (self.server.folder / ".lab" / "lab.log").read_text(errors="replace")
        raise RuntimeError(f"no kernel is ready: errors {self.errors}; JupyterLab's log:\n{log[-5000:]}")

    def _note(self, request: Request) -> None:
        if not request.url.startswith((self.server.url, self.server.url.replace("http", "ws", 1), "data:", "blob:")):
            self.refused.append(request.url)

    def cell(self, name: str) -> Locator:
        """A cell by its id in the file, or by its place when the learner has added it."""
        place = self.ids.index(name)
        return self.page.locator(".jp-Notebook .jp-Cell").nth(place)

    def output(self, name: str) -> Locator:
        return self.cell(name).locator(".jp-Cell-outputArea")

    def source(self, name: str) -> str:
        return "\n".join(self.cell(name).locator(".cm-line").all_inner_texts())

    def write(self, name: str, text: str) -> None:
        """Replace what stands in a cell."""
        self.cell(name).scroll_into_view_if_needed()
        self.cell(name).locator(".cm-content").first.click()
        self.page.keyboard.press("Control+a")
        self.page.keyboard.insert_text(text)

    def start(self, name: str) -> None:
        """Run a cell, as Control+Enter does, and don't wait."""
        self.cell(name).scroll_into_view_if_needed()
        self.cell(name).locator(".cm-content").first.click()
        self.page.keyboard.press("Control+Enter")

    def run(self, name: str) -> None:
        self.start(name)
        self.wait_until_idle()

    def menu(self, name: str, command: str) -> None:
        """Choose a command from a menu of the menu bar."""
        self.page.keyboard.press("Escape")
        self.page.get_by_role("menuitem", name=name, exact=True).click()
        self.page.locator(".lm-Menu").get_by_text(command, exact=True).click()

    def run_all(self) -> None:
        """Run > Run All Cells; stops at the first error, as it does for a learner."""
        first = self.page.locator(".jp-Notebook .jp-Cell").first
        first.scroll_into_view_if_needed()
        first.click()  # the menu serves the notebook that has the focus
        self.menu("Run", "Run All Cells")
        self.wait_until_idle()

    def run_each(self, names: list[str]) -> None:
        """Run these cells, one after the other; the others keep the outputs that were saved with them."""
        for name in names:
            self.start(name)
        self.wait_until_idle()

    def add_cell(self, name: str, after: str, text: str) -> None:
        """A new code cell below the cell `after`."""
        self.cell(after).scroll_into_view_if_needed()
        self.cell(after).locator(".cm-content").first.click()
        self.page.keyboard.press("Escape")
        self.page.keyboard.press("b")
        self.ids.insert(self.ids.index(after) + 1, name)
        self.page.keyboard.press("Enter")
        self.page.keyboard.insert_text(text)

    def picture(self, name: str) -> str:
        """The picture that a cell shows, as its data URL."""
        return self.output(name).locator("img").first.get_attribute("src") or ""

    def next_picture(self, name: str, before: str) -> str:
        """The picture of a cell, once it is another one than `before`."""
        end = time.monotonic() + PATIENCE
        while not self.output(name).locator("img").count() or self.picture(name) == before:
            if time.monotonic() > end:
                raise TimeoutError(f"the picture of cell {name} did not change within {PATIENCE} s")
            self.page.wait_for_timeout(100)
        self.wait_until_idle()
        return self.picture(name)

    def drag(self, handle: Locator, along: Locator, fraction: float) -> None:
        """Take a slider's handle and let it go at a fraction of the slider's length."""
        handle.scroll_into_view_if_needed()
        start, track = handle.bounding_box(), along.bounding_box()
        height = start["y"] + start["height"] / 2
        self.page.mouse.move(start["x"] + start["width"] / 2, height)
        self.page.mouse.down()
        self.page.mouse.move(track["x"] + track["width"] * fraction, height, steps=8)
        self.page.mouse.up()

    def interrupt(self) -> None:
        """The stop button of the notebook's toolbar."""
        self.page.locator("[data-command='notebook:interrupt-kernel']").first.click()

    def wait_until_idle(self) -> None:
        """Until the kernel has had nothing to do for half a second: by then every update has been drawn."""
        quiet, end = 0, time.monotonic() + PATIENCE
        while quiet < 5:
            if time.monotonic() > end:
                raise TimeoutError(f"the kernel was still busy after {PATIENCE} s")
            self.page.wait_for_timeout(100)
            quiet = quiet + 1 if self.page.evaluate(IS_IDLE, self.path) else 0

    def save(self) -> None:
        self.page.keyboard.press("Escape")
        before = self.file.stat().st_mtime_ns
        self.page.keyboard.press("Control+s")
        end = time.monotonic() + PATIENCE
        while (self.file.stat().st_mtime_ns == before or not self._is_whole()) and time.monotonic() < end:
            self.page.wait_for_timeout(100)

    def _is_whole(self) -> bool:
        """Whether the file can be read: JupyterLab empties it before it writes it."""
        try:
            json.loads(self.file.read_text(encoding="utf-8"))
        except ValueError:
            return False
        return True

    def screenshot(self, path: Path) -> None:
        self.page.screenshot(path=str(path))

    def screenshots(self, folder: Path, stem: str, height: int = 1600) -> list[Path]:
        """The whole notebook from top to bottom, in as many pictures as it takes."""
        self.page.set_viewport_size({"width": self.page.viewport_size["width"], "height": height})
        scroller = self.page.locator(".jp-NotebookPanel .jp-WindowedPanel-outer")
        self.page.wait_for_timeout(500)
        size = scroller.evaluate("panel => [panel.scrollHeight, panel.clientHeight]")
        written, top = [], 0
        while not written or top < size[0]:
            scroller.evaluate("(panel, top) => { panel.scrollTop = top }", top)
            self.page.wait_for_timeout(200)
            written.append(folder / f"{stem}-{len(written) + 1:02d}.png")
            self.screenshot(written[-1])
            top += size[1]
        return written


_CONTRASTS = """([texts, without]) => {
    const channels = color => (color.match(/[\\d.]+/g) || []).map(Number);
    const light = ([r, g, b]) => [r, g, b].map(v => v / 255)
        .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
        .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
    const behind = element => {
        for (; element; element = element.parentElement) {
            const color = channels(getComputedStyle(element).backgroundColor);
            if (color.length === 3 || color[3] > 0.9) return color;
        }
        return [255, 255, 255];
    };
    const found = [];
    for (const element of document.querySelectorAll(texts)) {
        const own = [...element.childNodes].filter(n => n.nodeType === 3).map(n => n.textContent.trim()).join("");
        if (!own || !element.checkVisibility() || (without && element.closest(without))) continue;
        const [a, b] = [light(channels(getComputedStyle(element).color)), light(behind(element))];
        found.push([(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), own.slice(0, 60)]);
    }
    return found;
}"""


def contrasts(page: Page, texts: str, without: str = "") -> list[tuple[float, str]]:
    """The contrast (WCAG 2.2) of each text in these elements with what lies behind it, and the text.

    texts, without    CSS selectors: the elements, and those whose inside is left out
    """
    return [(contrast, text) for contrast, text in page.evaluate(_CONTRASTS, [texts, without])]
