"""A cell in IPython's syntax binds the names that it binds in IPython, and its other lines stay as they are."""

import ast
import json
import subprocess
import sys

import pytest

from tplab.course.grade.answers import is_stub, names_in
from tplab.course.grade.needs import has_side_effects
from tplab.course.notebooks.ipython_syntax import ipython_lines, to_python
from tplab.course.notebooks.source import bound_names, checked_in, parse_code, predictions_in, used_names

CELLS = [
    "files = !echo a b", "t = %timeit -o -n 1 -r 1 f(1)", "len?", "?len", "%time y = f(x)", "y = %time f(x)",
    "!true", "import asyncio\nz = await asyncio.sleep(0, 5)", ",f x", ";f x", "/f x", "%time\nw = 3",
    "\n\n%cd .\nw = 3", "%%time\nclass A:\n    pass\n\ndef g(): ...", "%%capture\n%%time\n\nw = 3",
    "%%timeit -n 1 -r 1\nhidden = f(x)", "%%prun -q\nw = 3", "%%writefile /dev/null\nhidden = 3",
    "%%bash\nhidden=3", ">>> w = 3\n>>> v = w", "    w = 3\n    !true",
    "for i in range(2):\n    !true\n    %time y = i\n", "def g(x):\n    !true\n    return x",
    "w = '''\n% not a magic\n!ls\n'''", "w = (7\n% 4)", "!true \\\n  more\nw = 3", "%time for i in [1]: v = i",
    "é = %time f('é')", "w = 3  # %time y = 4\n!true",
]  # fmt: skip

RUN = """
import json, sys
from IPython.core.interactiveshell import InteractiveShell
found = []
for cell in json.load(sys.stdin):
    shell = InteractiveShell()
    shell.run_cell("def f(x): return x\\nx = 1")
    before = dict(shell.user_ns)
    assert shell.run_cell(cell).success, cell
    new = shell.user_ns
    found.append([name for name in new if not name.startswith("_") and new[name] is not before.get(name)])
print("\\n" + json.dumps(found))
"""


def test_the_names_that_a_cell_binds_are_those_that_it_binds_in_ipython():
    done = subprocess.run(
        [sys.executable, "-c", RUN], input=json.dumps(CELLS), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    right = dict(zip(CELLS, map(set, json.loads(done.stdout.splitlines()[-1])), strict=True))
    assert {cell: bound_names(cell) for cell in CELLS} == right


def test_what_a_magic_or_a_command_mentions_is_used():
    assert used_names("%%px 2\ny = x + 1\ny") >= {"x", "y", "get_ipython"}
    assert {"f", "x"} <= used_names("t = %timeit -o f(x)")
    assert {"folder", "x"} <= used_names("!ls {folder} $x")
    assert used_names("%time y = f(x)") == {"f", "x"}


def test_what_is_no_code_is_a_syntax_error():
    for cell in ("def f(:", "cd ..", "x = 1; !ls", "\x00", "(" * 500, "1" + "+1" * 10_000):
        with pytest.raises(SyntaxError):
            parse_code(cell)
        assert names_in(cell) == ({"f"} if "def" in cell else set())
        assert checked_in(cell) == ""
        assert not has_side_effects(cell)


def test_side_effects_are_found_in_every_place_of_a_line():
    assert all(has_side_effects(cell) for cell in ("!pip list", "x = !cd ..", "if x:\n    %cd ..", "x = %env A=1"))
    assert not any(has_side_effects(cell) for cell in ("len?", "%time x = 1", "x = (1\n% 2)", "'''\n!ls\n'''"))


def test_the_lines_that_need_ipython_are_known_by_number():
    assert ipython_lines(parse_code("x = 1\ny = !ls\ndef f():\n    %cd ..")) == [2, 4]
    assert ipython_lines(parse_code("\n\n%cd ..")) == [3], "empty lines at the top count"
    assert ipython_lines(ast.parse("get_ipython")) == [1]


def test_a_check_is_known_with_a_comment_a_magic_or_other_arguments():
    checks = ('check("4.1", A)', "# why?\n\ncheck('4.1', A, B)  # b", '%time check("4.1", A)', '%%time\ncheck("4.1")')
    others = ('x = 1\ncheck("4.1", A)', "check()", 'print(check("4.1"))', '# check("4.1", A)', "'check(\"4.1\")'")
    assert [checked_in(cell) for cell in checks] == ["4.1"] * len(checks)
    assert [checked_in(cell) for cell in others] == [""] * len(others)


def test_a_prediction_is_what_the_call_asks_for_and_nothing_else_in_the_cell():
    call = 'predict("4.a", calls=1, bytes=f(h=3))'
    for form in ("{}", "h = 16\n{}", "# h = 16\n{}  # a=1", "!ls a=1\n%time {}", "note = 'a = 1'\nx = {}"):
        assert predictions_in(form.format(call)) == {"4.a": {"calls", "bytes"}}, form
    assert predictions_in('predict("4.a", **known)') == {"4.a": {"**"}}
    assert predictions_in("predict()\npredict(number)\n# predict('4.a', x=1)") == {}


def test_a_stub_is_known_by_what_it_raises_and_not_by_a_comment():
    stub = 'def f(x):\n    raise NotImplementedError("exercise 4.1")'
    assert is_stub(stub, "4.1")
    assert is_stub(stub + "\n!ls\nx = = 1", "4.1"), "it can't be parsed"
    assert is_stub("%%time\n" + stub.replace('"', "'"), "4.1")
    assert not is_stub(stub, "4.2")
    assert not is_stub('def f(x):\n    # raise NotImplementedError("exercise 4.1")\n    return x', "4.1")


def test_lines_that_are_python_keep_their_text_and_their_place():
    python = ("def", "class", "for", "w =", "import")
    for cell in CELLS:
        lines = [line.strip() for line in to_python(cell).split("\n")]
        plain = [line.strip() for line in cell.split("\n") if line.strip().startswith(python)]
        assert [line for line in plain if line not in lines] == []
        if "\\" not in cell and cell.strip() == cell and ">>>" not in cell:
            assert [lines[place] for place, line in enumerate(cell.split("\n")) if line.strip() in plain] == plain
