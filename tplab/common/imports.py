"""Find the modules of this project that a module depends on, directly or indirectly, by reading the source files.

    graph = ImportGraph(Path("."), "tplab")
    graph.closure([Path("tplab/tensor/linear.py")])       # the file itself and every file of tplab that it needs

Nothing is imported or run. Imports inside functions count, too. A name that a package re-exports counts as an import of
the module it comes from. Importing the package itself counts as importing everything that its `__init__` imports.
"""

import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path


class ImportGraph:
    """The imports among the Python files of some packages in one folder.

    packages: names of the packages, which are folders in `root`
    mentions: in this folder, any dotted name counts as an import, because tests start programs by name:
              `subprocess.run([..., "-m", "tplab.capstone"])`
    """

    def __init__(self, root: Path, *packages: str, mentions: Path | None = None) -> None:
        self.root, self.mentions = root, mentions
        names = "|".join(map(re.escape, packages))
        self._from = re.compile(rf"^\s*from ((?:{names})(?:\.\w+)*) import (\([^)]*\)|[^\n]*)", re.MULTILINE)
        self._import = re.compile(rf"^\s*import ((?:{names})(?:\.\w+)*)", re.MULTILINE)
        self._mention = re.compile(rf"\b(?:{names})(?:\.\w+)+")
        self.imports, self.exports = cache(self._imports), cache(self._exports)
        self._re_exporting: dict[Path, set[Path]] = {}  # by file: the packages that it gets names from

    def closure(self, files: Iterable[Path]) -> set[Path]:
        """Return these files and all files that they import, directly or indirectly."""
        found: set[Path] = set()
        waiting = list(files)
        while waiting:
            file = waiting.pop()
            if file not in found:
                found.add(file)
                waiting += self.imports(file)
        return found.union(*(self._re_exporting[file] for file in found))

    def _imports(self, file: Path) -> frozenset[Path]:
        text = file.read_text(encoding="utf-8")
        names: set[str] = set()
        through = self._re_exporting[file] = set()
        for package, imported in self._from.findall(text):
            parts = re.findall(r"\w+", re.sub(r"#.*|\bas \w+", "", imported))
            names |= {self._module_of(package, part) for part in parts}
            if not all(self._file(f"{package}.{part}") for part in parts) and (source := self._file(package)):
                through.add(source)
        if self.mentions is not None and self.mentions in file.parents:
            names |= set(self._mention.findall(self._from.sub("", text)))
        else:
            names |= set(self._import.findall(text))
        return frozenset(found for name in names if (found := self._file_of_longest(name)) and found != file)

    def _module_of(self, package: str, name: str) -> str:
        """The module that `from package import name` is about: a submodule, or the one a package re-exports it from."""
        if self._file(f"{package}.{name}"):
            return f"{package}.{name}"
        file = self._file(package)
        exported_from = self.exports(file).get(name) if file and file.name == "__init__.py" else None
        return self._module_of(exported_from, name) if exported_from not in (None, package) else package

    def _exports(self, file: Path) -> dict[str, str]:
        """The names that a package imports, each with the module it comes from."""
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
