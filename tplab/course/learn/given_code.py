"""Copy the course's code that the learner's library needs into the library, so that it runs without tplab.

    from tplab.tensor import divide                in a chapter's setup
    from .given.tensor_sharding import divide      in my_tp/linear.py
    my_tp/given/tensor_sharding.py                 `divide`, and what it uses from tplab/tensor/sharding.py

Only the definitions that are used are copied, so that learners see how little of the library they haven't written. We
read the sources but never run them. templates/ has more modules for my_tp: adapters and blocks adapt the learner's
answers to the way later chapters call them, and demo runs them. It also contains train.py.
"""

import ast
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import tplab
from tplab.course.grade.needs import binds
from tplab.course.learn.passages import Statement, joined_imports, single_imports, top_level

PACKAGE = "my_tp"
GIVEN = "given"  # the folder in the package that the copies go to
TEMPLATES = Path(__file__).parent / "templates"
_SOURCES = Path(tplab.__file__).parent
# If an answer imports something from these, it stays an import. train.py's loop is in tplab.capstone, but no answer
# imports it. my_tp.py asks for it by its module and its name (GIVEN_FOR_TRAINING)
_NOT_COPIED = ("tplab.course", "tplab.capstone", "tplab.viz", "tplab.runtime.launcher", "tplab.runtime.hooks")
# What the copies import in place of a name from tplab. Outside tplab, nothing records communication
_STAND_INS = {"unrecorded": "from contextlib import nullcontext as unrecorded"}


class CannotCopy(Exception):  # noqa: N818 (it says what to do: import it)
    """Raised for a name that no module of the course defines, or whose definition uses code that isn't copied."""


@dataclass(frozen=True)
class Part:
    """A definition to copy, identified by its module and its name.

    Examples are Part("tplab.tensor.sharding", "divide") and Part("my_tp.blocks", "ParallelMLP").
    """

    module: str
    name: str

    @property
    def file(self) -> str:
        """The file in the package that the part is copied to, such as "given/tensor_sharding.py" or "blocks.py"."""
        return _file(self.module)

    def imported(self, into: str = "", name: str = "") -> str:
        """Return the statement that imports the part into a file of the package, under its own name or as `name`."""
        path = self.file.removesuffix(".py").replace("/", ".")
        path = path.removeprefix(f"{GIVEN}.") if into.startswith(f"{GIVEN}/") else path
        return f"from .{path} import {self.name}" + (f" as {name}" if name not in ("", self.name) else "")


@dataclass(frozen=True)
class _Source:
    """A module's top-level statements, and an index of the names that they bind.

    bound:     name -> the positions in `statements` of those that bind it
    imported:  name -> the import statement that binds it
    """

    statements: list[Statement]
    bound: dict[str, list[int]]
    imported: dict[str, str]


@cache
def find_part(module: str, name: str) -> Part:
    """Find the definition of a name that can be imported from a module of the course.

    Raises CannotCopy if the course doesn't define the name, or only in code that isn't copied.
    """
    if module.startswith(_NOT_COPIED):
        raise CannotCopy(f"{name} of {module}")
    source = _read(module)
    imported = source.imported.get(name, "")
    if imported.startswith("from tplab"):
        return _origin(imported)
    if imported or name not in source.bound:
        raise CannotCopy(f"{name} of {module}")
    return Part(module, name)


def _origin(imported: str) -> Part:
    """Find the definition that a statement like `from tplab.tensor import divide as cut` imports."""
    module, _, name = imported.removeprefix("from ").partition(" import ")
    return find_part(module, name.partition(" as ")[0])


def copies(parts: Iterable[Part]) -> dict[str, str]:
    """Return the files of the package that contain these parts and everything they use, as {file: text}.

    Raises CannotCopy if they use code that isn't copied.
    """
    places: dict[str, set[int]] = {}  # module -> the positions of the statements to copy
    imports: dict[str, set[str]] = {}  # module -> import statements that import one name each
    waiting, done = list(parts), set[Part]()
    while waiting:
        part = waiting.pop()
        if part not in done:
            done.add(part)
            for place in _read(part.module).bound.get(part.name, []):
                found, needed = _uses(part.module, place)
                places.setdefault(part.module, set()).add(place)
                imports.setdefault(part.module, set()).update(needed)
                waiting += found
    return {
        _file(module): _text(module, [_read(module).statements[place] for place in sorted(places[module])], needed)
        for module, needed in sorted(imports.items())
    }


@cache
def _uses(module: str, place: int) -> tuple[list[Part], set[str]]:
    """Return the parts that the statement at a position in a module uses, and the imports that it needs."""
    source = _read(module)
    one = source.statements[place]
    for node in ast.walk(one.node):
        if isinstance(node, ast.Import | ast.ImportFrom) and "tplab" in ast.unparse(node):
            raise CannotCopy(f"{module}: {ast.unparse(node)}")
    parts, imports = [], set()
    for name in one.uses:
        imported = source.imported.get(name, "")
        if name in _STAND_INS and imported:
            imports.add(_STAND_INS[name])
        elif imported.startswith("from tplab"):
            parts.append(_origin(imported))
            imports.add(parts[-1].imported(_file(module), name))
        elif imported:
            imports.add(imported.replace(f"from {PACKAGE}.", "from ."))
        elif name in source.bound:
            parts.append(Part(module, name))
    return parts, imports


def _text(module: str, kept: list[Statement], imports: set[str]) -> str:
    heading = f'"""Given by the course: the part of {module} that my answers use."""'
    if module.startswith(PACKAGE):
        heading = _read(module).statements[0].text
    head = "\n\n".join(filter(None, [heading, joined_imports(imports)]))
    return "\n\n\n".join([head, *(one.text for one in kept)]) + "\n"


@cache
def _read(module: str) -> _Source:
    """Read the top-level statements of a module, including those under `if TYPE_CHECKING`.

    Raises CannotCopy if there is no such module.
    """
    try:
        text = _path(module).read_text(encoding="utf-8")
    except OSError:
        raise CannotCopy(f"{module} is no module of the course") from None
    source = _Source([], {}, {})
    for one in top_level(text):
        if isinstance(one.node, ast.If) and ast.unparse(one.node.test) == "TYPE_CHECKING":
            source.statements.extend(Statement(node, ast.unparse(node)) for node in one.node.body)
        else:
            source.statements.append(one)
    for place, one in enumerate(source.statements):
        for imported in single_imports(one.node):
            source.imported.update(dict.fromkeys(binds(imported), imported))
        if not isinstance(one.node, ast.Import | ast.ImportFrom):
            for name in one.binds:
                source.bound.setdefault(name, []).append(place)
    return source


def _path(module: str) -> Path:
    package, *names = module.split(".")
    path = (TEMPLATES if package == PACKAGE else _SOURCES).joinpath(*names)
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _file(module: str) -> str:
    package, *names = module.split(".")
    return f"{names[0]}.py" if package == PACKAGE else f"{GIVEN}/{'_'.join(names)}.py"
