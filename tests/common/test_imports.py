"""`tplab.common.imports`: the graph of imports of a small project."""

from pathlib import Path

import pytest

from tplab.common.imports import ImportGraph

FILES = {
    "pack/__init__.py": "",
    "pack/low.py": "import os\n",
    "pack/room/__init__.py": "from pack.room.one import One\nfrom pack.room.three import Three\n",
    "pack/room/one.py": "from pack import low as lowest  # the ground floor\n",
    "pack/room/two.py": "def late():\n    from pack.room import (\n        one,  # a module\n        missing,\n    )\n",
    "pack/room/three.py": "",
    "pack/user.py": "from pack.room import One\n",
    "pack/part.py": "from pack import room\nprint(room.One)\n",
    "other/__init__.py": "from pack import low\n",
}
ROOM = {"pack/room/__init__.py", "pack/room/one.py", "pack/room/three.py", "pack/low.py"}
ONE = ROOM - {"pack/room/three.py"}
EXPECTED = {
    "pack/low.py": set(),
    "pack/room/one.py": {"pack/low.py"},
    "pack/room/two.py": ROOM,
    "pack/user.py": ONE,
    "pack/part.py": ONE,
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize("name", EXPECTED)
def test_a_file_needs_what_it_imports_and_what_that_imports(project, name):
    graph = ImportGraph(project, "pack")
    needed = {str(path.relative_to(project)) for path in graph.closure([project / name])}
    assert needed == EXPECTED[name] | {name}
