"""The settings of a capstone run: what to train, how to split it over ranks, and what to save.

Each setting has a default, a line of help, perhaps a minimum, and a kind, which says if a resumed run may change it.

    LAYOUT      may change: how the ranks train the same model. The losses stay the same
    FREE        may change: the log and the checkpoints, and what may rescue a run that has diverged
    FIXED       must not change, because a different model, text or order of the data would make it a different run
"""

from dataclasses import asdict, dataclass, field, fields
from math import isfinite
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml

from tplab.common.files import replace
from tplab.memory.config import GPTConfig, Recompute, check_tensor_parallel
from tplab.memory.memory_bill import Layout, layers_of_stage

Layers = Literal["tplab", "mine", "plain"]
Missing = Literal["tplab", "error"]
Precision = Literal["float32", "bfloat16", "float64"]
Zero = Literal[0, 1, 2, 3]
FIXED, LAYOUT, FREE = "fixed", "layout", "free"
LARGEST_SEED = 2**32 - 1  # so that the larger seeds of individual micro-batches fit into 64 bits

ONLY_OF_TPLAB = (  # layers other than tplab's only support the defaults of these settings
    "num_kv_heads", "ffn_hidden_size", "gated", "bias", "tied_embedding", "learned_positions", "dropout", "pp", "zero",
    "sequence_parallel", "recompute",
)  # fmt: skip
GROUPS = {  # the first setting of each group, and the group's title in the help
    "folder": "the run",
    "data": "the text",
    "layers": "the model",
    "tp": "the parallel layout",
    "batch_size": "training",
    "log_every": "logs, samples and checkpoints",
}


def _of(default: Any, text: str, least: float | None = None, changes: str = FIXED) -> Any:
    return field(default=default, metadata={"help": text, "least": least, "changes": changes})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a training run. Raises ValueError for invalid settings, and says which values would work.

    The sizes and the kind of the GPT are set as in `GPTConfig`. The defaults describe a GPT-2, and the preset "llama"
    describes a Llama. If pp doesn't divide the number of layers, each of the first stages gets one more layer.
    """

    folder: str = _of("runs/capstone", "folder for the log, the checkpoints and the report", changes=FREE)
    steps: int = _of(200, "optimizer steps of the full run and of its learning rate schedule", 1, FREE)
    stop_after: int | None = _of(None, "stop after this step; the same command without this flag resumes", 1, FREE)
    seed: int = _of(0, "random seed for weights, dropout and the order of the data", 0)

    data: str | None = _of(None, "a folder of text files to train on (default: Python's standard library)")
    data_limit: int | None = _of(None, "use only this many bytes of the text", 1)
    vocab_size: int = _of(8192, "vocabulary size of the byte-pair tokenizer, which is trained on the text", 258)

    layers: Layers = _of(
        "tplab", "tplab's layers, yours from my_tp (mine), or unsharded ones (plain)", changes=LAYOUT
    )  # fmt: skip
    chapters: str = _of(".", "for --layers mine: your folder, or the one that contains my_course/", changes=FREE)
    missing: Missing = _of(
        "tplab", "use the course's solutions for answers that haven't passed (tplab), or don't train (error)",
        changes=FREE,
    )  # fmt: skip
    num_layers: int = _of(4, "transformer layers")
    hidden_size: int = _of(128, "hidden size h")
    num_heads: int = _of(8, "attention heads per layer")
    num_kv_heads: int | None = _of(None, "heads for K and V, each shared by a group of heads (default: num_heads)")
    ffn_hidden_size: int | None = _of(None, "inner size of the MLP (default: 4 h)")
    seq_length: int = _of(128, "tokens per sequence, s")
    gated: bool = _of(False, "use a gated MLP (SwiGLU)")
    bias: bool = _of(True, "use biases and LayerNorm; without this, use RMSNorm and no biases")
    tied_embedding: bool = _of(True, "use the embedding table as the output layer, too")
    learned_positions: bool = _of(True, "use learned position embeddings; without this, use rotary ones")
    rotary_base: float = _of(10_000.0, "base of the rotary frequencies", 1)
    dropout: float = _of(0.0, "dropout probability", 0)

    tp: int = _of(1, "ranks that share each layer", 1, LAYOUT)
    pp: int = _of(1, "pipeline stages (1F1B schedule)", 1, LAYOUT)
    dp: int = _of(1, "replicas of the model that share each batch", 1, LAYOUT)
    zero: Zero = _of(0, "ZeRO stage: shard the optimizer state (1), also gradients (2), also weights (3)", 0, LAYOUT)
    micro_batch_size: int = _of(16, "sequences that a rank processes at a time", 1, LAYOUT)
    sequence_parallel: bool = _of(False, "shard the activations between the blocks along the sequence", changes=LAYOUT)
    async_grad_allreduce: bool = _of(
        True, "overlap the all-reduce of an input's gradient with computing the weight's gradient", changes=LAYOUT
    )
    shared_memory: bool = _of(
        True, "on CPUs of one machine, tensor-parallel all-reduces go through shared memory, not gloo", changes=LAYOUT
    )
    recompute: Recompute = _of("nothing", "activations that backward recomputes instead of saving them", changes=LAYOUT)
    compile: bool = _of(False, "compile each layer with torch.compile", changes=LAYOUT)

    batch_size: int = _of(16, "sequences per step, over all replicas and micro-batches", 1)
    precision: Precision = _of(
        "float32", "precision of matmuls; weights stay float32 (float64 is for comparing runs)", changes=FREE
    )
    learning_rate: float = _of(1e-3, "the highest learning rate, right after the warm-up", 0, FREE)
    min_learning_rate: float = _of(1e-4, "the lowest learning rate, at the end of the cosine", 0, FREE)
    warmup_steps: int = _of(20, "length of the linear warm-up", 0, FREE)
    weight_decay: float = _of(0.1, "AdamW's weight decay, which only applies to matrices", 0)
    beta1: float = _of(0.9, "AdamW's beta1", 0)
    beta2: float = _of(0.95, "AdamW's beta2", 0)
    max_norm: float = _of(1.0, "clip the gradient to this norm (0: don't clip)", 0, FREE)

    log_every: int = _of(1, "log every N steps", 1, FREE)
    evaluate_every: int = _of(100, "compute the loss on held-out text every N steps (0: only at the end)", 0, FREE)
    evaluation_batches: int = _of(4, "batches of held-out text per evaluation", 1, FREE)
    sample_every: int = _of(0, "generate a sample every N steps (0: only at the end; pp > 1: never)", 0, FREE)
    sample_tokens: int = _of(100, "tokens per sample (0, or pp > 1: no samples)", 0, FREE)
    prompt: str = _of("def", "text with which each sample begins", changes=FREE)
    save_every: int = _of(100, "save a checkpoint every N steps (0: never)", 0, FREE)
    keep: int = _of(2, "number of recent checkpoints to keep", 1, FREE)
    plan: bool = _of(True, "predict the run from timed kernels of a layer (not with pp or zero)", changes=FREE)

    def __post_init__(self) -> None:
        for one in fields(self):
            value, least = getattr(self, one.name), one.metadata["least"]
            _check_type(one.name, one.type, value)
            if isinstance(value, float) and not isfinite(value):
                raise ValueError(f"{one.name}={value} should be a finite number")
            if least is not None and value is not None and value < least:
                raise ValueError(f"{one.name}={value} should be {least} or more")
        for name in ("beta1", "beta2", "dropout"):
            if getattr(self, name) >= 1:
                raise ValueError(f"{name}={getattr(self, name)} should be at least 0 and less than 1")
        if self.seed > LARGEST_SEED:
            raise ValueError(f"seed={self.seed} should be at most 2^32 - 1 = {LARGEST_SEED}")
        if self.min_learning_rate > self.learning_rate:
            raise ValueError(
                f"min_learning_rate={self.min_learning_rate} should be at most learning_rate={self.learning_rate}"
            )
        each = self.dp * self.micro_batch_size
        if self.batch_size % each:
            raise ValueError(
                f"batch_size={self.batch_size} should be a multiple of dp · micro_batch_size = {self.dp} · "
                f"{self.micro_batch_size} = {each}. Try {max(each, round(self.batch_size / each) * each)}"
            )
        check_tensor_parallel(self.model, self.tp)
        _check_combinations(self)

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


_CHANGES = {one.name: one.metadata["changes"] for one in fields(Settings)}
OF_THE_MODEL = _CHANGES.keys() & {one.name for one in fields(GPTConfig)}
OF_THE_LAYOUT = [name for name, kind in _CHANGES.items() if kind == LAYOUT]

# Settings that determine the time, the memory and the messages of a step.
MATTER = [name for name in _CHANGES if name in OF_THE_MODEL or name in (*OF_THE_LAYOUT, "precision", "batch_size")]


def changed(now: Settings, before: Settings) -> dict[str, tuple[Any, Any]]:
    """Return the FIXED settings that differ, as {name: (before, now)}.

    If the precision was or is float64, it counts as FIXED, because only float64 runs have float64 weights.
    """
    pairs = {name: (getattr(before, name), getattr(now, name)) for name in _CHANGES}
    kinds = _CHANGES | ({"precision": FIXED} if "float64" in pairs["precision"] else {})
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1] and kinds[name] == FIXED}


def _check_type(name: str, kind: Any, value: Any) -> None:
    allowed = get_args(kind) or (kind,)
    if get_origin(kind) is Literal:
        fits = value in allowed
    else:
        fits = isinstance(value, (*allowed, int) if kind is float else allowed)
    if not fits or (isinstance(value, bool) and kind is not bool):
        wanted = " or ".join(getattr(part, "__name__", str(part)) for part in allowed)
        raise ValueError(f"{name} should be {wanted}, not {value!r}")
    if isinstance(value, str):
        value.encode()  # raises UnicodeEncodeError, which is a ValueError, if it has bytes that aren't UTF-8


def _check_combinations(s: Settings) -> None:
    """Raise ValueError for settings that don't work together, and say which one to change."""
    sizes = {"num_kv_heads": s.num_heads, "ffn_hidden_size": 4 * s.hidden_size}  # what None means
    for name in {"tplab": (), "mine": ONLY_OF_TPLAB, "plain": (*ONLY_OF_TPLAB, "tp", "dp")}[s.layers]:
        value, default = getattr(s, name), getattr(Settings, name)
        only = sizes.get(name, default)
        if value not in (default, only):
            raise ValueError(
                f'layers="{s.layers}" only supports {name}={only}. Use that instead of {name}={value}, or use '
                'layers="tplab"'
            )
    if s.sequence_parallel and s.seq_length % s.tp:
        raise ValueError(
            f"sequence_parallel needs a seq_length that is a multiple of tp={s.tp}, but seq_length={s.seq_length}"
        )
    if not s.learned_positions and s.model.head_dim % 2:
        raise ValueError(
            "rotary positions rotate pairs of elements, but each head has hidden_size / num_heads = "
            f"{s.model.head_dim} of them. Use an even number, or learned_positions=True"
        )
    if s.pp > s.num_layers:
        raise ValueError(f"pp={s.pp} is too large: each stage needs one of the num_layers={s.num_layers} layers")
    if s.zero and s.dp == 1:
        raise ValueError(f"zero={s.zero} shards over replicas, but dp=1. Set dp to 2 or more, or zero to 0")
    if s.zero == 3 and s.compile:
        raise ValueError("torch.compile can't trace the layers of zero=3. Set compile to False, or zero to 2")
