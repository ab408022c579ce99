"""Find the modules of this project that a module depends on, directly or indirectly, by reading the source files.

    graph = ImportGraph(Path("."), "tplab")
    graph.closure([Path("tplab/tensor/linear.py")])       # the file itself and every file of tplab that it needs

Nothing is imported or run. Imports inside functions count, too. If a file uses a name that a package re-exports, that
counts as an import of the module that the name comes from, even as `viz.heads` after `from tplab import viz`. If a file
uses a package in any other way, that counts as an import of everything that the package's `__init__` imports.
"""

import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple


class _Links(NamedTuple):
    """The files that a file imports, and the packages through whose `__init__` it imports some of them."""

    imports: frozenset[Path]
    packages: frozenset[Path]


class ImportGraph:
    """The imports among the Python files of some packages in one folder.

    packages: names of the packages, which are folders in `root`
    """

    def __init__(self, root: Path, *packages: str) -> None:
        self.root = root
        names = "|".join(map(re.escape, packages))
        self._from = re.compile(rf"^\s*from ((?:{names})(?:\.\w+)*) import (\([^)]*\)|[^\n]*)", re.MULTILINE)
        self._import = re.compile(rf"^\s*import ((?:{names})(?:\.\w+)*)", re.MULTILINE)
        self.links, self.exports = cache(self._links), cache(self._exports)

    def imports(self, file: Path) -> frozenset[Path]:
        """Return the files that a file imports directly."""
        return self.links(file).imports

    def closure(self, files: Iterable[Path]) -> set[Path]:
        """Return these files and all files that they import, directly or indirectly."""
        found: set[Path] = set()
        waiting = list(files)
        while waiting:
            file = waiting.pop()
            if file not in found:
                found.add(file)
                waiting += self.imports(file)
        return found.union(*(self.links(file).packages for file in found))

    def _links(self, file: Path) -> _Links:
        text = file.read_text(encoding="utf-8")
        rest = self._from.sub("", text)
        names: set[str] = set()
        packages: set[Path] = set()
        for package, imported in self._from.findall(text):
            for name in re.findall(r"\w+", re.sub(r"#.*|\bas \w+", "", imported)):
                submodule = self._file(f"{package}.{name}")
                if submodule and submodule.name == "__init__.py":
                    names |= self._modules_used(f"{package}.{name}", name, rest)
                    packages.add(submodule)
                else:
                    names.add(self._module_of(package, name))
                    if not submodule and (source := self._file(package)):
                        packages.add(source)
        names |= set(self._import.findall(rest))
        found = frozenset(path for name in names if (path := self._file_of_longest(name)) and path != file)
        return _Links(found, frozenset(packages))

    def _modules_used(self, package: str, name: str, text: str) -> set[str]:
        """Return the modules of `name.One`, `name.Two`, ... in the text, and the package if it's also used alone."""
        used = set(re.findall(rf"\b{name}\.(\w+)", text))
        as_a_whole = not used or re.search(rf"\b{name}\b(?!\.\w)", text)
        return {self._module_of(package, attribute) for attribute in used} | ({package} if as_a_whole else set())

    def _module_of(self, package: str, name: str) -> str:
        """Return the module that `from package import name` refers to.

        That's a submodule, the module that the package re-exports the name from, or the package itself.
        """
        if self._file(f"{package}.{name}"):
            return f"{package}.{name}"
        file = self._file(package)
        exported_from = self.exports(file).get(name) if file and file.name == "__init__.py" else None
        return self._module_of(exported_from, name) if exported_from not in (None, package) else package

    def _exports(self, file: Path) -> dict[str, str]:
        """Return the names that a package imports, each with the module that it comes from."""
        found = self._from.findall(file.read_text(encoding="utf-8"))
        return {
            name: module
            for module, imported in found
            for name in re.findall(r"\w+", re.sub(r"#.*|\w+ as ", "", imported))
        }

    def _file(self, module: str) -> Path | None:
        path = self.root.joinpath(*module.split("."))
        if (package := path / "__init__.py").is_file():
            return package
        return path.with_suffix(".py") if path.with_suffix(".py").is_file() else None

    def _file_of_longest(self, name: str) -> Path | None:
        """Find the file of the longest prefix of `name` that is a module: tplab.viz.table for tplab.viz.table.head."""
        while name:
            if found := self._file(name):
                return found
            name = name.rpartition(".")[0]
        return None
