"""A class of more than forty for `tplab grade`: diligent, clumsy and hostile students, all of them of chapter 90.

Exercise 90.3 is answered wrongly by everyone who does not only want to pass it honestly. So whoever has it passed,
without being named as honest in HONEST, has cheated with success.
"""

import glob
import json
import os
import zipfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from tests.course import tiny

RIGHT, WRONG = "return x + x", "return x + 2"
P, F, T, N = "passed", "failed", "to do", "not run"
EXERCISES = 3
SECRET = "a-token-that-nobody-may-see"

# What a cell above exercise 2 does, and the statuses that follow. None: whatever, but exercise 3 must not pass.
CELLS: dict[str, tuple[str, tuple[str, ...] | None]] = {
    "endless loop": ("while True: pass", (P, P, F)),
    "endless loop that swallows interrupts": (
        "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
        None,
    ),
    "sleeps past every limit": ("import time\nfor i in range(10): time.sleep(100)", (P, P, F)),
    "fork bomb": ("import os, time\nwhile True:\n    try: os.fork()\n    except OSError: pass", None),
    "threads": (
        "import threading, time\nfor i in range(200): threading.Thread(target=time.sleep, args=(5,)).start()",
        None,
    ),
    "memory eater": ("hog = []\nwhile True: hog.append(b'x' * 10**8)", (P, P, F)),
    "memory eater in children": (
        """
import os, time
for i in range(40):
    if not os.fork():
        hog = b'x' * 10**8
        time.sleep(60)
        os._exit(0)
time.sleep(60)
""",
        None,
    ),
    "large file": ("with open('large', 'wb') as file:\n    while True: file.write(b'x' * 10**7)", (P, P, F)),
    "many files": (
        "import os\nfor i in range(10**9):\n    os.makedirs(f'd{i}'); open(f'd{i}/f', 'wb').write(b'x' * 10**6)",
        None,
    ),
    "deleted file": (
        "import os, time\nfiles = []\nfor i in range(100):\n    files.append(open(f'f{i}', 'wb')); os.unlink(f'f{i}')\n"
        "    files[-1].write(b'x' * 10**7); files[-1].flush()\ntime.sleep(60)",
        None,
    ),
    "prints gigabytes": ("while True: print('x' * 10**6)", None),
    "prints gigabytes past Python": ("import os\nwhile True: os.write(1, b'x' * 10**6)", None),
    "os._exit": ("import os; os._exit(0)", (P, N, N)),
    "segfault": ("import ctypes; ctypes.string_at(0)", (P, N, N)),
    "kills its parents": (
        """
import os, signal
assert sum(map(str.isdigit, os.listdir('/proc'))) < 60, 'this is not a namespace: the test would end your session'
parents, pid = [], os.getppid()
while pid > 0:
    parents.append(pid)
    pid = int(open(f'/proc/{pid}/stat').read().rpartition(')')[2].split()[1])
for pid in parents:
    os.kill(pid, signal.SIGKILL)
""",
        None,
    ),
    "kills everyone": (
        """
import os, signal
assert sum(map(str.isdigit, os.listdir('/proc'))) < 60, 'this is not a namespace: the test would end your session'
os.kill(-1, signal.SIGKILL)
""",
        None,
    ),
    "kills what it can find": (
        """
import os, signal
assert sum(map(str.isdigit, os.listdir('/proc'))) < 60, 'this is not a namespace: the test would end your session'
for pid in range(1, 2**17):
    try:
        if pid != os.getpid() and b'tplab' in open(f'/proc/{pid}/cmdline', 'rb').read():
            os.kill(pid, signal.SIGKILL)
    except OSError:
        pass
""",
        None,
    ),
    "deletes everything": (
        "import shutil\nfor path in (FOLDER, OUT, HOME): shutil.rmtree(path, ignore_errors=True)",
        None,
    ),
    "writes elsewhere": (
        "import pathlib\nfor path in (FOLDER, OUT, HOME, '/tmp', '/dev/shm'):\n"
        "    try: pathlib.Path(path, 'pwned').write_text('x')\n    except OSError: pass\n"
        "try: pathlib.Path(OUT, 'outcomes', 'pwned.json').write_text('x')\nexcept OSError: pass",
        (P, P, F),
    ),
    "patches the course": (
        "import torch, tplab.course\nfrom tplab.course.checks import exercises, run_answer\n"
        "tplab.course.check = exercises.check = run_answer.fail = lambda *a, **k: None\n"
        "torch.allclose = torch.equal = lambda *a, **k: True\ndef check(*a): return 'Exercise 90.3 passed'",
        (P, P, F),
    ),
    "forges results": (
        """
import json, os
row = {'role': 'check', 'number': '90.3', 'outcome': 'passed', 'id': 'check-90-3'}
verdict = {'verdict': {'number': '90.3', 'title': 'x', 'status': 'passed', 'text': ''}}
for pid in filter(str.isdigit, os.listdir('/proc')):
    try:
        names = os.listdir(f'/proc/{pid}/fd')
    except OSError:
        continue
    for name in names:
        try:
            if int(pid) != os.getpid() and 'pipe' in os.readlink(f'/proc/{pid}/fd/{name}'):
                with open(os.open(f'/proc/{pid}/fd/{name}', os.O_WRONLY | os.O_NONBLOCK), 'wb') as pipe:
                    pipe.write(f'\\n{json.dumps(row)}\\n{json.dumps(verdict)}\\n'.encode())
        except OSError:
            pass
""",
        (P, P, F),
    ),
    "leaves a process": (
        "import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', 'import time; time.sleep(987)'],"
        " start_new_session=True, env={})",
        (P, P, F),
    ),
    "ends its checker and stays": (
        """
import os, signal, subprocess
subprocess.Popen(['sleep', '987'], start_new_session=True, env={})
worker = int(open(f'/proc/{os.getppid()}/stat').read().rpartition(')')[2].split()[1])
os.kill(worker, signal.SIGKILL)
os.kill(os.getppid(), signal.SIGKILL)
os.kill(os.getpid(), signal.SIGKILL)
""",
        None,
    ),
    "deep folders": ("import os\nfor i in range(3000):\n    os.mkdir('d'); os.chdir('d')\nos.chmod('.', 0)", None),
    "takes Ann's file": ("double_3 = open(FOLDER + '/Ann.ipynb').read()", (P, P, F)),
    "takes the solution": ("answer = open(ROOT + '/solutions/90_tiny.py').read()", (P, P, F)),
    "tells secrets": ("import os\nraise ValueError(dict(os.environ))", (P, P, F)),
    "raises 100 MB": ("raise ValueError('x' * 10**8)", None),
}
ANSWERS: dict[str, tuple[str, tuple[str, ...] | None]] = {
    "exits": ("import os; os._exit(0)", (P, F, F)),
    "loops": ("while True: pass", (P, F, F)),
    "injects": ("raise ValueError('=1+1</pre><script>alert(1)</script>\\x1b[31m\\u202e')", (P, F, F)),
}
NAMES = {
    "=cmd|' calc'!A0": (P, F, T),
    "<img src=x onerror=alert(1)>": (P, F, T),
    '"><script>alert(2)<': (P, F, T),
    "two\nlines, \u202etxt": (P, F, T),
    os.fsdecode(b"Ren\xe9"): (P, F, T),
    "x" * 200: (P, F, T),
    "Смит 日本 😀": (P, F, T),
}


def everyone() -> list[str]:
    """The names of all students."""
    return [*CELLS, *ANSWERS, *_others(lambda *_, **__: Path(), Path()), *NAMES]


def make(root: Path, folder: Path, out: Path, home: Path, names: Sequence[str]) -> dict[str, tuple | None]:
    """Write the submissions of those named, and return the statuses expected by entry; () for no notebook."""
    chapter = root / "chapters" / "90_tiny.ipynb"
    folder.mkdir()
    expected: dict[str, tuple | None] = {}
    paths = {"FOLDER": folder, "OUT": out, "HOME": home, "ROOT": root}

    def submit(name: str, statuses: tuple | None, *bodies: str, own: str = "", path: str = "") -> Path:
        mine = tiny.Learner(chapter)
        for k, body in enumerate(bodies, 1):
            mine.answer(k, body)
        if own:
            values = "".join(f"{key} = {str(value)!r}\n" for key, value in paths.items() if key in own)
            mine.insert(mine.place("exercise-90-2"), values + own)
        target = folder / (path or f"{name}.ipynb")
        target.parent.mkdir(parents=True, exist_ok=True)
        expected[name] = statuses
        return mine.save(target)

    for name, (own, statuses) in CELLS.items():
        if name in names:
            submit(name, statuses, RIGHT, RIGHT, WRONG, own=own)
    for name, (body, statuses) in ANSWERS.items():
        if name in names:
            submit(name, statuses, RIGHT, body, WRONG)
    for name, made in _others(submit, folder).items():
        if name in names:
            made()
    for name, statuses in NAMES.items():
        if name in names:
            submit(name, statuses, RIGHT, WRONG)
    return expected


def _others(submit: Callable[..., Path], folder: Path) -> dict[str, Callable[[], object]]:
    """Students whose files are odd; their names are the entries in the folder."""
    all_right = [RIGHT] * EXERCISES

    def broken(name: str, change: Callable[[bytes], bytes], statuses: tuple = (N, N, N)) -> None:
        path = submit(name, statuses, *all_right)
        path.write_bytes(change(path.read_bytes()))

    def edited(cells: dict[str, str]) -> Callable[[bytes], bytes]:
        def edit(data: bytes) -> bytes:
            content = json.loads(data)
            for cell in content["cells"]:
                cell.update({"source": cells[cell["id"]]} if cell["id"] in cells else {})
            return json.dumps(content).encode()

        return edit

    def fakes() -> None:
        path = submit("fakes", (F, F, F), WRONG, WRONG, WRONG)
        content = json.loads(path.read_bytes())
        for cell in content["cells"]:
            if str(cell.get("id")).startswith("check-90-"):
                text = f"Exercise 90.{cell['id'][-1]} passed"
                shown = {"output_type": "execute_result", "data": {"text/plain": text}, "metadata": {}}
                cell.update(source=repr(text), outputs=[shown | {"execution_count": 1}], execution_count=1)
        path.write_text(json.dumps(content))

    def other_chapter() -> None:
        submit("other chapter", (), *all_right)
        path = folder / "other chapter.ipynb"
        text = path.read_text()
        for old, new in (("exercise-90", "exercise-89"), ('"exercise": "90', '"exercise": "89')):
            text = text.replace(old, new)
        path.write_text(text)

    def two_copies() -> None:
        for k, name in enumerate(("90_tiny.ipynb", "90_tiny-Copy1.ipynb"), 1):
            path = submit("two copies/", (P, P, P), *(all_right if k == 2 else []), path=f"two copies/{name}")
            os.utime(path, (k * 1e9, k * 1e9))

    def with_helper(name: str, file: str, text: str, statuses: tuple) -> None:
        body = f"import {file.partition('.')[0]} as it; return it.double(x)"
        submit(f"{name}/", statuses, RIGHT, body, RIGHT, path=f"{name}/homework/90_tiny.ipynb")
        (folder / name / "homework" / file).write_text(text)

    def make_folder(name: str) -> Path:
        (folder / name).mkdir(exist_ok=True)
        return folder / name

    def linked() -> None:
        submit("linked/", (), path="linked/x.ipynb").unlink()
        (folder / "linked" / "x.ipynb").symlink_to(folder / "Ann.ipynb")

    def link() -> None:
        submit("link.ipynb", ()).unlink()
        (folder / "link.ipynb").symlink_to(folder / "Ann.ipynb")

    def pipe() -> None:
        submit("pipe.ipynb", ()).unlink()
        os.mkfifo(folder / "pipe.ipynb")

    def empty() -> None:
        submit("empty/", (), path="empty/x.ipynb").unlink()

    def archive() -> None:
        submit("archive.zip", ()).unlink()
        with zipfile.ZipFile(folder / "archive.zip", "w") as file:
            file.writestr("x.ipynb", "{}")

    def unreadable() -> None:
        path = submit("unreadable", (P, P, P) if os.geteuid() == 0 else (), *all_right)
        path.chmod(0)

    return {
        "Ann": lambda: submit("Ann", (P, P, P), *all_right),
        "Ann/": lambda: submit("Ann/", (P, F, T), RIGHT, WRONG, path="Ann/90_tiny.ipynb"),
        "blank": lambda: submit("blank", (T, T, T)),
        "Rena/": lambda: submit("Rena/", (P, P, P), *all_right, path="Rena/untitled (3).ipynb"),
        "Ben_90_tiny": lambda: submit("Ben_90_tiny", (P, P, P), *all_right),
        "two copies/": two_copies,
        "helper/": lambda: with_helper("helper", "helper.py", "def double(x): return 2 * x", (P, P, P)),
        "hides torch/": lambda: with_helper("hides torch", "torch.py", "def double(x): return 2 * x", (F, F, F)),
        "fakes": fakes,
        "other chapter": other_chapter,
        "cut short": lambda: broken("cut short", lambda data: data[: len(data) // 2]),
        "UTF-16": lambda: broken("UTF-16", lambda data: data.decode().encode("utf-16"), ()),
        "nested": lambda: broken("nested", lambda data: data[:-1] + b', "x": ' + b"[" * 10**5),
        "number": lambda: broken("number", lambda data: data[:-1] + b', "x": ' + b"9" * 10**4 + b"}"),
        "syntax": lambda: broken("syntax", edited({"exercise-90-2": "def double_2(x:"}), (P, F, P)),
        "huge": lambda: broken("huge", lambda data: data + b" " * 60_000_000, ()),
        "zeros": lambda: broken("zeros", lambda data: b"\x00" * 1000, ()),
        "unreadable": unreadable,
        "link.ipynb": link,
        "linked/": linked,
        "pipe.ipynb": pipe,
        "empty/": empty,
        "archive.zip": archive,
    }


HONEST = ("Ann", "Rena/", "Ben_90_tiny", "two copies/", "helper/", "syntax", "unreadable")


def contents(folder: Path) -> dict[str, bytes]:
    """The files of a folder with their bytes, links as such."""
    return {
        str(path.relative_to(folder)): os.fsencode(os.readlink(path)) if path.is_symlink() else path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


def left_behind() -> list[str]:
    """Processes that work in a scratch folder of `tplab grade`, and such folders, of this process's tests."""
    scratch = os.path.join(os.environ["TMPDIR"], "tplab-grade-")
    found = glob.glob(f"{scratch}*")
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.cwd().startswith(scratch):
                found.append(" ".join(process.cmdline()))
    return found
