"""The settings of a capstone run: what to train, how to split it over ranks, and what to save.

The folder of a run contains its settings as settings.yaml (`tplab.capstone.settings.io` reads that file and the flags).
When a run resumes, some settings may be different:

    the layout, the log, checkpoints        may change, because the losses stay the same
    how the rest is trained (`RETUNABLE`)   may change, because otherwise a diverged run couldn't be mended. The log and
                                            the report say what was changed, and at which step
    the model, the data and their order     must not change, because that would be a different run
"""

from dataclasses import asdict, dataclass, fields
from math import gcd, isfinite
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml

from tplab.common.files import replace
from tplab.memory.config import GPTConfig, Recompute, check_tensor_parallel
from tplab.memory.memory_bill import Layout

Layers = Literal["tplab", "mine", "dtensor", "plain"]
Precision = Literal["float32", "bfloat16", "float64"]
LARGEST_SEED = 2**32 - 1  # the seeds of single micro-batches, which are larger, then fit into 64 bits


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a training run. Raises ValueError for invalid ones, suggesting values that would work.

    folder                where the run writes its log, checkpoints and report
    data                  a folder of text files; None: the source code of the running Python's standard library
    data_limit            bytes of text to use; None: all
    vocab_size            size of the byte-pair tokenizer that is trained on the text
    layers                "tplab", "mine" (the learner's, from their library), "dtensor" (PyTorch's built-in tensor
                          parallelism), "plain" (a single process, no parallelism)
    chapters              the learner's folder, or one that has it as my_course/, for layers="mine"

    num_layers, hidden_size, num_heads, seq_length, dropout    of the GPT, as in `GPTConfig`

    tp, dp                number of ranks that share a model, and number of replicas
    sequence_parallel     shard the activations between blocks along the sequence
    async_grad_allreduce  compute a weight's gradient while its input's gradient is all-reduced
    recompute             what backward recomputes: "nothing", "attention" or "layers"
    compile               compile each layer with torch.compile
    precision             "float32"; "bfloat16": matmuls in bfloat16 (autocast), weights and optimizer in float32;
                          "float64": for comparing runs with each other

    steps                 optimizer steps of the full run, on which the learning rate schedule is based
    batch_size            sequences per step, over all replicas and micro-batches
    micro_batch_size      sequences that a rank processes at a time
    learning_rate, min_learning_rate, warmup_steps    linear warm-up to the first, then cosine decay to the second
    weight_decay, beta1, beta2                        of AdamW
    max_norm              clip gradients to this norm; 0: don't clip
    seed                  for weights, dropout and the order of the data

    stop_after            stop after this step, as if the run were interrupted; None: run to the end
    log_every, evaluate_every, sample_every, save_every    in steps; 0: never (evaluation and samples: only at the end)
    evaluation_batches    batches of held-out text per evaluation
    sample_tokens, prompt length of a sample in tokens, and its beginning
    keep                  number of newest checkpoints to keep
    async_save            continue training while a checkpoint is written
    tensorboard           also write a log for TensorBoard
    """

    folder: str = "runs/capstone"
    data: str | None = None
    data_limit: int | None = None
    vocab_size: int = 8192
    layers: Layers = "tplab"
    chapters: str = "."

    num_layers: int = 4
    hidden_size: int = 128
    num_heads: int = 8
    seq_length: int = 128
    dropout: float = 0.0

    tp: int = 1
    dp: int = 1
    sequence_parallel: bool = False
    async_grad_allreduce: bool = True
    recompute: Recompute = "nothing"
    compile: bool = False
    precision: Precision = "float32"

    steps: int = 200
    batch_size: int = 16
    micro_batch_size: int = 16
    learning_rate: float = 1e-3
    min_learning_rate: float = 1e-4
    warmup_steps: int = 20
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    max_norm: float = 1.0
    seed: int = 0

    stop_after: int | None = None
    log_every: int = 1
    evaluate_every: int = 100
    evaluation_batches: int = 4
    sample_every: int = 0
    sample_tokens: int = 100
    prompt: str = "def"
    save_every: int = 100
    keep: int = 2
    async_save: bool = True
    tensorboard: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            choices = get_args(field.type) if get_origin(field.type) is Literal else ()
            if choices and getattr(self, field.name) not in choices:
                known = ", ".join(map(str, choices))
                raise ValueError(f"{field.name}={getattr(self, field.name)!r} is not one of {known}")
            if field.type is float and not isfinite(getattr(self, field.name)):
                raise ValueError(f"{field.name}={getattr(self, field.name)} should be a finite number")
        _check_sizes(self)
        if self.layers == "plain" and self.ranks > 1:
            raise ValueError(f'layers="plain" has no parallelism: tp={self.tp}, dp={self.dp} should both be 1')
        if self.layers != "tplab" and self.dropout:
            raise ValueError(
                f'dropout={self.dropout} needs layers="tplab", because layers="{self.layers}" has no dropout. Set it '
                "to 0"
            )
        if self.vocab_size < 258:
            raise ValueError(f"vocab_size={self.vocab_size}: the 256 bytes and two tokens more are the fewest, 258")
        if not 0 <= self.min_learning_rate <= self.learning_rate:
            raise ValueError(
                f"min_learning_rate={self.min_learning_rate} should lie between 0 and "
                f"learning_rate={self.learning_rate}"
            )
        check_tensor_parallel(self.model, self.tp)
        if self.sequence_parallel and self.seq_length % self.tp:
            raise ValueError(f"seq_length={self.seq_length} can't be cut over tp={self.tp} ranks in whole tokens")
        each = self.dp * self.micro_batch_size
        if self.batch_size % each:
            smaller = gcd(self.micro_batch_size, self.batch_size // self.dp)
            fits = self.batch_size % self.dp == 0
            fewer = f", or micro_batch_size={smaller} for that batch" if fits else ""
            raise ValueError(
                f"batch_size={self.batch_size} should be a multiple of dp · micro_batch_size = {self.dp} · "
                f"{self.micro_batch_size} = {each}: try {max(each, round(self.batch_size / each) * each)}{fewer}"
            )

    @property
    def ranks(self) -> int:
        return self.tp * self.dp

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches per replica in each step."""
        return self.batch_size // (self.dp * self.micro_batch_size)

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.seq_length

    @property
    def last_step(self) -> int:
        """The step after which this run stops."""
        return self.steps if self.stop_after is None else min(self.steps, self.stop_after)

    @property
    def model(self) -> GPTConfig:
        return GPTConfig(
            num_layers=self.num_layers, hidden_size=self.hidden_size, num_heads=self.num_heads,
            vocab_size=self.vocab_size, seq_length=self.seq_length, dropout=self.dropout,
        )  # fmt: skip

    @property
    def layout(self) -> Layout:
        """The parallel layout, for the memory bill and the cost model."""
        return Layout(
            tp=self.tp, dp=self.dp, micro_batch=self.micro_batch_size, micro_batches=self.micro_batches,
            sequence_parallel=self.sequence_parallel, recompute=self.recompute,
        )  # fmt: skip

    def save(self, path: Path) -> None:
        """Write the settings as YAML, in field order, replacing the file atomically."""
        replace(path, yaml.safe_dump(asdict(self), sort_keys=False).encode())


# Settings that may be different when a run resumes, and don't change its losses.
CHANGEABLE = frozenset({
    "folder", "layers", "chapters", "tp", "dp", "sequence_parallel", "async_grad_allreduce", "recompute", "compile",
    "micro_batch_size", "stop_after", "log_every", "evaluate_every", "evaluation_batches", "sample_every",
    "sample_tokens", "prompt", "save_every", "keep", "async_save", "tensorboard",
})  # fmt: skip


# Settings that may be different when a run resumes, although the remaining steps then have other losses.
RETUNABLE = frozenset({"steps", "learning_rate", "min_learning_rate", "warmup_steps", "max_norm", "precision"})


def changed(now: Settings, before: Settings) -> dict[str, tuple[Any, Any]]:
    """Return the fields that differ but must not change when a run resumes, as {field: (before, now)}.

    Of the precisions, float64 is one that must not change, because its weights have another dtype.
    """
    pairs = _differences(now, before)
    stays = {"precision"} if "float64" in pairs.get("precision", ()) else set()
    return {name: pair for name, pair in pairs.items() if name not in CHANGEABLE | RETUNABLE or name in stays}


def retuned(now: Settings, before: Settings) -> dict[str, tuple[Any, Any]]:
    """Return the `RETUNABLE` fields that differ, as {field: (before, now)}."""
    return {name: pair for name, pair in _differences(now, before).items() if name in RETUNABLE}


def _differences(now: Settings, before: Settings) -> dict[str, tuple[Any, Any]]:
    pairs = {name: (getattr(before, name), value) for name, value in asdict(now).items()}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _check_sizes(settings: Settings) -> None:
    positive = ("tp", "dp", "steps", "batch_size", "micro_batch_size", "evaluation_batches", "keep", "max_norm")
    least = dict.fromkeys(positive, 1) | {"max_norm": 0, "learning_rate": 0}
    counts = ("warmup_steps", "log_every", "evaluate_every", "sample_every", "sample_tokens", "save_every", "seed")
    least |= dict.fromkeys(counts, 0) | {"weight_decay": 0}
    least |= {name: 1 for name in ("stop_after", "data_limit") if getattr(settings, name) is not None}
    for name, smallest in least.items():
        if getattr(settings, name) < smallest:
            raise ValueError(f"{name}={getattr(settings, name)} should be {smallest} or more")
    for name in ("beta1", "beta2", "dropout"):
        if not 0 <= getattr(settings, name) < 1:
            raise ValueError(f"{name}={getattr(settings, name)} should be at least 0 and less than 1")
    if settings.seed > LARGEST_SEED:
        raise ValueError(f"seed={settings.seed} should be at most 2^32 - 1 = {LARGEST_SEED}")
