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
from tplab.memory.memory_bill import Layout, layers_of_stage

Layers = Literal["tplab", "mine", "dtensor", "plain"]
Precision = Literal["float32", "bfloat16", "float64"]
Zero = Literal[0, 1, 2, 3]
LARGEST_SEED = 2**32 - 1  # the seeds of single micro-batches, which are larger, then fit into 64 bits

GPT_2: dict[str, Any] = {  # the only kind of model that other layers than tplab's can be
    "gated": False, "bias": True, "tied_embedding": True, "learned_positions": True, "norm_eps": 1e-5, "dropout": 0.0,
}  # fmt: skip


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

    num_layers .. dropout the sizes and the kind of the GPT, as in `GPTConfig`. The defaults are a GPT-2, and the preset
                          "llama" is a Llama: SwiGLU (gated), RMSNorm and no biases (bias=False), rotary positions

    tp, pp, dp            number of ranks that share a layer, of pipeline stages, and of replicas. The stages follow the
                          1F1B schedule. If pp doesn't divide the layers, the first stages have one more each
    zero                  stage of ZeRO: what the replicas share instead of each having it. 1: the optimizer's state,
                          2: gradients, too, 3: weights, too
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
    num_kv_heads: int | None = None
    ffn_hidden_size: int | None = None
    seq_length: int = 128
    gated: bool = False
    bias: bool = True
    tied_embedding: bool = True
    learned_positions: bool = True
    rotary_base: float = 10_000.0
    norm_eps: float = 1e-5
    dropout: float = 0.0

    tp: int = 1
    pp: int = 1
    dp: int = 1
    zero: Zero = 0
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
        if self.vocab_size < 258:
            raise ValueError(f"vocab_size={self.vocab_size}: the 256 bytes and two tokens more are the fewest, 258")
        if not 0 <= self.min_learning_rate <= self.learning_rate:
            raise ValueError(
                f"min_learning_rate={self.min_learning_rate} should lie between 0 and "
                f"learning_rate={self.learning_rate}"
            )
        check_tensor_parallel(self.model, self.tp)
        _check_combinations(self)
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
        return self.tp * self.pp * self.dp

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
        return GPTConfig(**{name: getattr(self, name) for name in OF_THE_MODEL})

    @property
    def layers_of_stages(self) -> list[int]:
        """The number of layers in each pipeline stage."""
        return [layers_of_stage(self.num_layers, self.pp, stage) for stage in range(self.pp)]

    @property
    def layout(self) -> Layout:
        """The parallel layout, for the memory bill and the cost model."""
        return Layout(
            tp=self.tp, pp=self.pp, dp=self.dp, micro_batch=self.micro_batch_size, micro_batches=self.micro_batches,
            sequence_parallel=self.sequence_parallel, recompute=self.recompute,
        )  # fmt: skip

    def save(self, path: Path) -> None:
        """Write the settings as YAML, in field order, replacing the file atomically."""
        replace(path, yaml.safe_dump(asdict(self), sort_keys=False).encode())


OF_THE_MODEL = {field.name for field in fields(Settings)} & {field.name for field in fields(GPTConfig)}

# Settings that determine how the same model is trained on the ranks.
LAYOUT = (
    "layers", "tp", "pp", "dp", "zero", "sequence_parallel", "async_grad_allreduce", "recompute", "compile",
    "micro_batch_size",
)  # fmt: skip

# Settings that may be different when a run resumes, and don't change its losses.
CHANGEABLE = frozenset({
    *LAYOUT, "folder", "chapters", "stop_after", "log_every", "evaluate_every", "evaluation_batches", "sample_every",
    "sample_tokens", "prompt", "save_every", "keep", "async_save", "tensorboard",
})  # fmt: skip


# Settings that determine the time, the memory and the messages of a step.
MATTER = ("precision", "batch_size", *LAYOUT, *sorted(OF_THE_MODEL))


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
    positive = ("tp", "pp", "dp", "steps", "batch_size", "micro_batch_size", "evaluation_batches", "keep", "max_norm")
    least = dict.fromkeys(positive, 1) | {"max_norm": 0, "learning_rate": 0}
    counts = (
        "rotary_base",
        "norm_eps",
        "warmup_steps",
        "log_every",
        "evaluate_every",
        "sample_every",
        "sample_tokens",
        "save_every",
        "seed",
    )
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


def _check_combinations(settings: Settings) -> None:
    """Raise ValueError for settings that exclude each other, saying which of them to change."""
    s, model = settings, settings.model
    if s.layers != "tplab":
        others = {
            "num_kv_heads": (model.kv_heads, s.num_heads), "ffn_hidden_size": (model.ffn_size, 4 * s.hidden_size),
            "pp": (s.pp, 1), "zero": (s.zero, 0), **{name: (getattr(s, name), GPT_2[name]) for name in GPT_2},
        }  # fmt: skip
        others |= {"dp": (s.dp, 1)} if s.layers in ("dtensor", "plain") else {}
        others |= {"tp": (s.tp, 1)} if s.layers == "plain" else {}
        for name, (value, only) in others.items():
            if value != only:
                raise ValueError(
                    f'{name}={value} needs layers="tplab": layers="{s.layers}" only supports {name}={only}. Use either'
                )
    if s.layers == "dtensor" and s.compile and s.recompute != "nothing":
        raise ValueError(
            f'layers="dtensor" with compile=True and recompute="{s.recompute}" fails in torch.compile itself: set '
            'recompute="nothing" or compile=False'
        )
    if s.sequence_parallel and s.seq_length % s.tp:
        raise ValueError(f"seq_length={s.seq_length} can't be cut over tp={s.tp} ranks in whole tokens")
    if not s.learned_positions and model.head_dim % 2:
        raise ValueError(
            f"rotary positions turn pairs of elements, and a head has hidden_size / num_heads = {model.head_dim}. Use "
            "an even number, or learned_positions=True"
        )
    if s.pp > s.num_layers:
        raise ValueError(
            f"pp={s.pp} stages can't share num_layers={s.num_layers}: each needs a layer. Set pp to {s.num_layers} or "
            "less"
        )
    if s.zero and s.dp == 1:
        raise ValueError(
            f"zero={s.zero} shards over replicas, and dp=1 is a single one. Set dp to 2 or more, or zero to 0"
        )
    if s.zero == 3 and s.compile:
        raise ValueError(
            "compile=True can't trace a layer whose weights come and go, as they do with zero=3. Set compile to False, "
            "or zero to 2"
        )
