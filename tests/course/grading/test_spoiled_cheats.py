"""`tplab check` and notebooks that try to pass without an answer: each trick with a wrong and with a right answer."""

import re

import pytest

from tests import ROOT
from tests.course import tiny
from tplab.course.grading.check_notebook import Note, Verdict, check_notebook
from tplab.course.notebooks.cells import read_notebook

TEXT = "Exercise 90.{k} passed: double_{k}\\n  Right: the value."  # what a check that passes shows
FAKE = f"class Fake:\n    def __repr__(self): return '{TEXT}'\n"

# Above the check, in a cell of the learner's own. {k} is the exercise's number.
OWN_CELLS = {
    "patched torch": """
import torch, builtins
for name in ("allclose", "equal", "isclose", "all", "any", "max", "sub"):
    setattr(torch, name, lambda *a, **k: True)
torch.Tensor.allclose = torch.Tensor.equal = torch.Tensor.__eq__ = lambda *a, **k: True
""",
    "patched builtins": "import builtins\nbuiltins.round = builtins.sorted = lambda *a, **k: 0",
    "a name in front of a builtin": """
from tplab.course.checks import exercises as checking
checking.isinstance = lambda *a: True
checking.replace = lambda *a, **k: __builtins__.__dict__.get('x')
""",
    "another launch": """
import tplab, tplab.runtime, tplab.runtime.launcher, tplab.course.checks.exercises
for module in (tplab, tplab.runtime, tplab.runtime.launcher, tplab.course.checks.exercises):
    module.launch = lambda *a, **k: None
""",
    "other modules": """
import sys, types
for name in [name for name in sys.modules if name.startswith("tplab.course.check")]:
    sys.modules[name] = types.ModuleType(name)
""",
    "the expected output, printed": f"print('{TEXT}')\ndisplay({{'text/plain': '{TEXT}'}}, raw=True)",
    "at exit": f"import atexit\natexit.register(lambda: print('{TEXT}'))",
    "an input transformer": FAKE
    + """
def other(lines):
    return ["Fake()"] if any(line.startswith('check("90.{k}"') for line in lines) else lines
get_ipython().input_transformers_cleanup.append(other)
""",
    "an input transformer that also takes the guard": FAKE
    + """
def other(lines):
    if any("check" in line and "90.{k}" in line for line in lines):
        return ["Fake()" if lines[0].startswith("check") else "pass"]
    return lines
get_ipython().input_transformers_post.append(other)
""",
    "an ast transformer": FAKE
    + """
import ast
class Other(ast.NodeTransformer):
    def visit_Call(self, node):
        if ast.unparse(node).startswith("check('90.{k}'"):
            return ast.copy_location(ast.parse("Fake()").body[0].value, node)
        return node
get_ipython().ast_transformers.append(Other())
""",
    "another input transformer manager": FAKE
    + """
class Other(type(get_ipython().input_transformer_manager)):
    def transform_cell(self, text):
        return "Fake()" if text.startswith('check("90.{k}"') else super().transform_cell(text)
get_ipython().input_transformer_manager = Other()
""",
    "a hook before each cell": FAKE
    + """
def other(*ignored):
    get_ipython().user_ns["check"] = lambda number, *a: Fake()
get_ipython().events.register("pre_run_cell", other)
get_ipython().events.register("pre_execute", other)
""",
    "a shell that catches": FAKE
    + """
from IPython.core.interactiveshell import InteractiveShell
old = InteractiveShell.run_code
async def other(self, code, result=None, **more):
    failed = await old(self, code, result, **more)
    if result is not None and result.error_in_exec is not None:
        result.error_in_exec = None
        self.displayhook(Fake())
    return False
InteractiveShell.run_code = other
get_ipython().showtraceback = lambda *a, **k: None
""",
    "a shell object that catches": FAKE
    + """
shell = get_ipython()
kept = shell.run_code
async def other(code, result=None, **more):
    await kept(code, result, **more)
    if result is not None and result.error_in_exec is not None:
        result.error_in_exec = None
        shell.displayhook(Fake())
    return False
object.__setattr__(shell, "run_code", other)
""",
    "a trace function": """
import sys
def trace(frame, event, value):
    frame.f_globals["fail"] = lambda *a, **k: None
    return trace
sys.settrace(trace)
sys.setprofile(trace)
""",
    "the other exercise's check": "from tplab.course.checks import exercises as checking\n"
    "checking._exercises['90.{k}'] = checking.Exercise('90.{k}', 'Double {k}', lambda f: checking.Verdict())",
    "a magic": "from IPython.core.magic import register_cell_magic\n@register_cell_magic\ndef time(line, cell): pass",
    "a verdict that needs nothing": "import tplab.course.feedback.verdict as v\n"
    "v.CheckFailed.__init_subclass__ = None\n"
    "v.CheckFailed = v.CheckFailed.__bases__[0]\nv.CheckFailed_ = Exception",
}

# The body of the function itself, which runs inside the check: {right} returns the right number or a wrong one
BODIES = {
    "patches from inside": "import tplab.course.checks.run_answer as c; c.fail = lambda *a, **k: None; return {right}",
    "patches the code from inside": (
        "import tplab.course.checks.run_answer as c; c.fail.__code__ = (lambda *a, **k: None).__code__; return {right}"
    ),
    "prints the expected output": f"print('{TEXT}'); return {{right}}",
}
FROM_INSIDE = {"patches from inside", "patches the code from inside"}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder))
        tiny.make(folder, tiny.source(len(OWN_CELLS) + len(BODIES) + 1))
    return folder


def check(root, right: str) -> dict[str, Verdict]:
    mine = tiny.Learner(root / "chapters" / "90_tiny.ipynb")
    for k, source in enumerate(OWN_CELLS.values(), 1):
        mine.answer(k, f"return {right}")
        mine.insert(mine.place(f"check-90-{k}"), source.replace("{k}", str(k)))
    for k, body in enumerate(BODIES.values(), len(OWN_CELLS) + 1):
        mine.answer(k, body.replace("{k}", str(k)).replace("{right}", right))
    reference = read_notebook(root / "solutions" / "90_tiny.ipynb")
    stream = list(check_notebook(reference, mine.save(root / "chapters" / "mine.ipynb")))
    assert [said.text for said in stream if isinstance(said, Note)] == []
    said = [said for said in stream if isinstance(said, Verdict)]
    assert said.pop().status == "to do"
    return dict(zip([*OWN_CELLS, *BODIES], said, strict=True))


def test_no_trick_lets_a_wrong_answer_pass(root, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(root))
    said = check(root, "x + 2")
    assert {verdict.status for verdict in said.values()} == {"failed"}
    changed = {trick: verdict.text for trick, verdict in said.items() if "is 5." not in verdict.text}
    assert set(changed) == {"patches the code from inside"}, "the others fail because the answer is wrong, and hear so"


def test_no_trick_costs_a_right_answer_its_verdict(root, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(root))
    said = check(root, "x + x")
    refused = {trick: verdict.text for trick, verdict in said.items() if verdict.status != "passed"}
    assert set(refused) == FROM_INSIDE, "a check that was changed proves nothing, whatever the answer"
    for text in refused.values():
        assert text.endswith("A check that was changed says nothing about the answer; leave it as it is.")
        assert re.match(
            r"While the check of exercise 90.\d+ ran, your code changed tplab\.course\.[\w.]+\.fail\.", text
        )


SHARD = """
def shard(tensor, dim, rank, world_size):
    length = tensor.shape[dim] // world_size
    if tensor.shape[dim] % world_size:
        raise ValueError(f"{tensor.shape[dim]} can't be divided by {world_size}")
    return tensor.narrow(dim, {start}, length).clone(memory_format=torch.contiguous_format)

def unshard(shards, dim):
    return torch.cat(list(shards), dim)
"""
GATHER = """
def gather_last_dim(y):
    y = y.contiguous()
    parts = [torch.empty_like(y) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, y)
    return torch.cat(parts{wrong}, dim=-1)
"""


@pytest.mark.parametrize(("start", "wrong", "status"), [("rank * length", "", "passed"), ("0", "[::-1]", "failed")])
@pytest.mark.slow
def test_patches_of_torch_and_launch_change_no_verdict_of_a_real_chapter(tmp_path, start, wrong, status):
    """The checks of chapter 2 compare tensors of real ranks, so they build on what is patched here."""
    mine = tiny.Learner(ROOT / "chapters" / "02_splitting_matrices.ipynb")
    reference = read_notebook(ROOT / "solutions" / "02_splitting_matrices.ipynb")
    mine.cell("exercise-2-1")["source"] = SHARD.replace("{start}", start)
    mine.cell("exercise-2-4")["source"] = GATHER.replace("{wrong}", wrong)
    mine.content["cells"] = [cell for cell in mine.cells if cell["id"] != "check-2-1"]
    patches = [OWN_CELLS[trick] for trick in ("patched torch", "another launch", "other modules")]
    for place in range(len(mine.cells), 0, -1):
        if mine.cells[place - 1]["id"] in ("exercise-2-1", "exercise-2-4"):
            made = {"cell_type": "code", "metadata": {}, "outputs": [], "execution_count": None, "id": f"own-{place}"}
            mine.cells.insert(place, made | {"source": "\n".join(patches)})
    path = mine.save(tmp_path / "mine.ipynb")
    said = {
        verdict.number: verdict.status
        for number in ("2.1", "2.4")
        for verdict in check_notebook(reference, path, exercises=[number])
        if isinstance(verdict, Verdict)
    }
    assert said == {"2.1": status, "2.4": status}
