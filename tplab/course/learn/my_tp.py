"""Compose the text of the learner's package, my_tp, from their passed answers. `library.py` writes it to files.

    linear.py                     the answers to chapter 04, with the imports and helpers they use
    adapters.py, blocks.py        given: small adapters for answers that later chapters call in a different way
    demo.py, __main__.py          given: what `python -m my_tp pipeline` runs
    given/tensor_sharding.py      given: the course's code that the answers use (see given_code.py)

If a later chapter imports from tplab what the learner wrote in an earlier one, the package uses the learner's answer
instead. An answer that hasn't passed yet is borrowed, which means that its name still comes from tplab. So the package
needs tplab until every answer that it uses is written.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from tplab.course.learn.course_files import Course, chapter
from tplab.course.learn.given_code import GIVEN, PACKAGE, CannotCopy, Part, copies, find_part
from tplab.course.learn.passages import Passage, joined_imports
from tplab.course.notebooks.cells import read_notebook
from tplab.course.notebooks.numbering import START_NUMBER, chapter_of, heading
from tplab.course.notebooks.source import passed_names

MODULES = (  # by chapter number. The modules of chapters that a teacher adds are named by their number
    "memory", "collectives", "splitting", "operators", "linear", "mlp", "attention", "embedding", "cross_entropy",
    "randomness", "transformer", "cost", "sequence", "pipeline", "data_parallel", "training",
)  # fmt: skip

# Name that later chapters import from tplab -> the exercise whose answer takes its place, and the module that has it
REPLACED = {
    "copy_to_region": ("3.2", "adapters"),
    "reduce_from_region": ("3.3", "adapters"),
    "scatter_to_region": ("3.3", "adapters"),
    "gather_from_region": ("3.3", "adapters"),
    "ColumnParallelLinear": ("4.1", "linear"),
    "RowParallelLinear": ("4.2", "linear"),
    "shard": ("4.3", "linear"),
    "unshard": ("4.3", "linear"),
    "ParallelMLP": ("5.2", "blocks"),
    "ParallelAttention": ("6.2", "blocks"),
    "VocabParallelEmbedding": ("7.3", "embedding"),
    "parallel_logits": ("7.4", "embedding"),
    "vocab_parallel_cross_entropy": ("8.3", "blocks"),
    "transformer": ("10.3", ""),
    "allreduce_sequence_parallel_gradients": ("12.3", "blocks"),
}
ADAPTERS = ("adapters", "blocks")

FOR_THE_DEMO = ("13.1", "13.2", "13.3")  # the exercises whose answers `python -m my_tp pipeline` needs

# The exercises that a GPT is made of (chapter 15), and the one behind each block of its poster
FOR_A_GPT = (
    "3.2", "3.3", "4.1", "4.2", "5.2", "6.2", "7.2", "7.3", "7.4", "8.1", "8.2", "8.3", "10.2", "10.3", "10.4", "14.4",
)  # fmt: skip
BLOCKS = {"embedding": "7.3", "attention": "6.2", "MLP": "5.2", "logits": "7.4", "loss": "8.3"}

# What train.py imports: the answers to these exercises, and these parts of the course's code
FOR_TRAINING = ("10.3", "10.4", "10.5", "15.1", "15.2", "15.3")
GIVEN_FOR_TRAINING = (
    Part("tplab.memory.config", "GPTConfig"), Part("tplab.tensor.initialization", "init_parameter"),
    Part("tplab.capstone.learners_loop", "Functions"), Part("tplab.capstone.learners_loop", "train"),
)  # fmt: skip
_TRAINS = (3, 4, 5, 6, 7, 8, 10, 15)  # the chapters whose modules train.py imports, directly or indirectly


@dataclass(frozen=True)
class Module:
    """What a chapter's module contains.

    answers:   exercise -> its answer, in order
    imports:   import statements that import one name each
    parts:     the parts of the given code and of the adapters that it imports
    borrowed:  exercise of an earlier chapter that isn't written yet -> the names that come from tplab instead
    """

    chapter: int
    answers: dict[str, Passage]
    imports: set[str] = field(default_factory=set)
    parts: list[Part] = field(default_factory=list)
    borrowed: dict[str, list[str]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return module_name(self.chapter)

    @property
    def lines(self) -> int:
        """How many lines of the learner's code it has, not counting blank lines."""
        return sum(passage.lines for passage in self.answers.values())


def module_name(chapter: int) -> str:
    """Return the name of the file in the package that contains the answers to a chapter's exercises."""
    if chapter == START_NUMBER:
        return "matmul.py"
    return f"{MODULES[chapter] if chapter < len(MODULES) else f'chapter_{chapter:02d}'}.py"


def chapters_of(exercises: Iterable[str]) -> list[int]:
    return sorted({chapter_of(exercise) for exercise in exercises})


def names_of(course: Course, number: int) -> dict[str, list[str]]:
    """Return the names that a chapter's checks receive, by exercise: {"4.3": ["shard", "unshard"], ...}."""
    cells = read_notebook(chapter(course, number).reference)
    return {cell.marks["check"]: passed_names(cell.source) for cell in cells if "check" in cell.marks}


def files(course: Course, modules: Sequence[Module], dates: Mapping[str, str]) -> dict[str, str]:
    """Return the text of each file in the package, as {"linear.py": ..., "given/tensor_sharding.py": ...}.

    modules:  see `modules_of`
    dates:    when each answer passed, by exercise. A solution that takes the place of an answer has no date
    """
    parts = [part for module in modules for part in module.parts]
    parts += GIVEN_FOR_TRAINING if is_enough_to_train(modules) else ()
    texts = {module.name: _module_text(course, module, dates) for module in modules}
    there = {exercise for module in modules for exercise in module.answers}
    if there >= {*FOR_THE_DEMO}:
        parts += [Part(f"{PACKAGE}.demo", "main")]
        texts["__main__.py"] = "from .demo import main\n\nmain()\n"
    given = copies(parts)
    if any(name.startswith(GIVEN) for name in given):
        given[f"{GIVEN}/__init__.py"] = (
            '"""What the course gave me: the code that my answers use and that I did not write."""\n'
        )
    return {**texts, **given, "__init__.py": _package_text(modules, given)}


def is_enough_to_train(modules: Iterable[Module]) -> bool:
    """Return whether train.py can run, because everything that it imports is written and borrows nothing."""
    needed = [module for module in modules if module.chapter in _TRAINS]
    there = {exercise for module in needed for exercise in module.answers}
    return there >= {*FOR_TRAINING} and not any(module.borrowed for module in needed)


def modules_of(course: Course, written: Mapping[str, Passage]) -> list[Module]:
    """Return the modules of the chapters that have passed answers, in order.

    An answer that uses one of the same chapter waits until that one has passed.
    """
    modules, there = [], set[str]()
    for number in chapters_of(written):
        module, missing = Module(number, {}), set[str]()
        for exercise, names in names_of(course, number).items():
            if exercise in written and not written[exercise].used & missing:
                module.answers[exercise] = written[exercise]
            else:
                missing |= {*names}
        there |= module.answers.keys()
        for text in sorted({text for passage in module.answers.values() for text in passage.imports}):
            _import(text, module, there)
        modules += [module] if module.answers else []
    return modules


def _import(text: str, module: Module, there: Collection[str]) -> None:
    """Add an import to a module. Answers that are there and copies take the place of what it imports from tplab."""
    home, _, bound = text.removeprefix("from ").partition(" import ")
    name, _, alias = bound.partition(" as ")
    exercise, place = REPLACED.get(name, ("", ""))
    part = None
    if not text.startswith(("from tplab", "import tplab")):
        pass
    elif exercise and chapter_of(exercise) <= module.chapter and (not place or chapter_of(exercise) < module.chapter):
        if exercise not in there:
            module.borrowed.setdefault(exercise, []).append(name)
        elif place in ADAPTERS:
            part = Part(f"{PACKAGE}.{place}", name)
        else:
            text = f"from .{place} import {bound}"
    else:
        with suppress(CannotCopy):  # then it's imported from tplab
            copies([find_part(home, name)])
            part = find_part(home, name)
    module.imports.add(part.imported(name=alias) if part else text)
    module.parts.extend([part] if part else [])


def _module_text(course: Course, module: Module, dates: Mapping[str, str]) -> str:
    page = chapter(course, module.chapter)
    title = f"{heading(module.chapter)}, {page.title(read_notebook(page.reference))}"
    docstring = f'"""{title}: written by me, and checked on real ranks."""'
    parts = ["\n\n".join(filter(None, [docstring, joined_imports(module.imports)]))]
    helpers: set[str] = set()
    for exercise, passage in module.answers.items():
        parts += [helper for helper in passage.helpers if helper not in helpers]
        helpers |= {*passage.helpers}
        passed = f", passed on {dates[exercise]}" if exercise in dates else ""
        parts += [f"# Exercise {exercise}{passed}", *passage.code]
    return "\n\n\n".join(parts) + "\n"


def _package_text(modules: Iterable[Module], given: Iterable[str]) -> str:
    lines = ['"""My own library for tensor parallelism, which grows with each exercise that I pass.', ""]
    lines += [f"{module.name.removesuffix('.py'):<15} exercises {', '.join(module.answers)}" for module in modules]
    others = sorted({name.removesuffix(".py").partition("/")[0] for name in given})
    return "\n".join([*lines, *(f"{name:<15} given by the course" for name in others), '"""', ""])
