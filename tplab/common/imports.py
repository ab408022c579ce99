"""Find the modules of this project that a module depends on, directly or indirectly, by reading the source files.

    graph = ImportGraph(Path("."), "tplab")
    graph.closure([Path("tplab/tensor/linear.py")])       # the file itself and every file of tplab that it needs

Nothing is imported or run. Imports inside functions count, too. Importing a package counts as importing its `__init__`
with everything that it imports.
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
        self.imports = cache(self._imports)

    def closure(self, files: Iterable[Path]) -> set[Path]:
        """Return these files and all files that they import, directly or indirectly."""
        found: set[Path] = set()
        waiting = list(files)
        while waiting:
            file = waiting.pop()
            if file not in found:
                found.add(file)
                waiting += self.imports(file)
        return found

    def _imports(self, file: Path) -> frozenset[Path]:
        text = file.read_text(encoding="utf-8")
        names: set[str] = set()
        for package, imported in self._from.findall(text):
            parts = re.findall(r"\w+", re.sub(r"#.*|\bas \w+", "", imported))
            submodules = {f"{package}.{part}" for part in parts if self._file(f"{package}.{part}")}
            names |= submodules if len(submodules) == len(parts) else {package, *submodules}
        everywhere = self.mentions is not None and self.mentions in file.parents
        names |= set((self._mention if everywhere else self._import).findall(text))
        return frozenset(found for name in names if (found := self._file_of_longest(name)) and found != file)

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
