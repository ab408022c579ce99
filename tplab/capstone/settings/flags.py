"""The flags of `python -m tplab.capstone`: one per field of `Settings`, in groups, each with a line of help."""

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from tplab.capstone.settings.presets import PRESETS
from tplab.capstone.settings.settings import Settings

GROUPS: dict[str, dict[str, str]] = {
    "the run": {
        "folder": "where its log, checkpoints and report lie",
        "steps": "of the whole run; the learning rate is planned for them",
        "stop_after": "stop after this step; the same command goes on",
        "seed": "of weights, dropout and the order of the data",
    },
    "the text": {
        "data": "a folder of text files (default: the sources of Python's standard library)",
        "data_limit": "bytes of text to take",
        "vocab_size": "tokens of the byte-pair tokenizer that is trained on the text",
    },
    "the model": {
        "layers": "whose: tplab's, mine (yours, from your library my_tp), torch's own (dtensor), plain (one process)",
        "chapters": "your folder, or one that has it as my_course/, for --layers mine",
        "num_layers": "transformer layers",
        "hidden_size": "h, the numbers that stand for a token",
        "num_heads": "of attention, in each layer",
        "num_kv_heads": "heads of K and V, which groups of heads share (default: as many as heads)",
        "ffn_hidden_size": "inner size of the MLP (default: 4 h)",
        "seq_length": "s, tokens of a sequence",
        "gated": "SwiGLU: the MLP has a gate",
        "bias": "linear layers have biases, and norms are LayerNorm; without: no biases, and RMSNorm",
        "tied_embedding": "the output layer uses the embedding's table",
        "learned_positions": "a learned vector for each position; without: rotary positions",
        "rotary_base": "of the frequencies of rotary positions",
        "norm_eps": "what a norm adds to the variance",
        "dropout": "share of numbers that is left out while training",
    },
    "how it is laid out over ranks": {
        "tp": "ranks that share each layer",
        "pp": "pipeline stages, each with some of the layers",
        "dp": "replicas of the model, each with its part of the batch",
        "zero": "what replicas share: 1 the optimizer's state, 2 gradients, too, 3 weights, too",
        "sequence_parallel": "cut what lies between the blocks along the sequence",
        "async_grad_allreduce": "compute a weight's gradient while that of its input travels",
        "recompute": "what backward computes again, to save memory",
        "compile": "let torch.compile make kernels of each layer",
        "precision": "of products; weights and optimizer are float32 (float64: to compare runs)",
    },
    "training": {
        "batch_size": "sequences of a step, over all ranks",
        "micro_batch_size": "sequences that a rank computes at once",
        "learning_rate": "the highest, after the warm-up",
        "min_learning_rate": "the lowest, at the end of the cosine",
        "warmup_steps": "until the highest is reached",
        "weight_decay": "of AdamW, for matrices",
        "beta1": "of AdamW",
        "beta2": "of AdamW",
        "max_norm": "longer gradients are shortened to it; 0: none is",
    },
    "what is written": {
        "log_every": "steps from one row of the log to the next",
        "evaluate_every": "steps; 0: at the end only",
        "evaluation_batches": "batches of held-out text in an evaluation",
        "sample_every": "steps; 0: at the end only",
        "sample_tokens": "tokens of a sample",
        "prompt": "with which a sample begins",
        "save_every": "steps from one checkpoint to the next; 0: none",
        "keep": "checkpoints to keep, the newest ones",
        "async_save": "go on training while a checkpoint is written",
        "tensorboard": "write a log for TensorBoard, too",
    },
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags to a parser, which should omit flags that aren't given (argument_default=argparse.SUPPRESS)."""
    start = parser.add_argument_group("where the settings come from (a later one wins: preset, file, flags)")
    start.add_argument("--preset", choices=sorted(PRESETS), help="a configuration to start from")
    start.add_argument("--config", type=Path, metavar="FILE", help="a YAML file with settings")
    kinds = {field.name: field.type for field in fields(Settings)}
    for title, flags in GROUPS.items():
        group = parser.add_argument_group(title)
        for name, text in flags.items():
            _add(group, name, kinds[name], text)


def _add(group: Any, name: str, kind: Any, text: str) -> None:
    flag = "--" + name.replace("_", "-")
    if kind is bool:
        group.add_argument(flag, action=argparse.BooleanOptionalAction, help=text)
    elif get_origin(kind) is Literal:
        group.add_argument(flag, choices=get_args(kind), type=type(get_args(kind)[0]), help=text)
    else:
        number = next(part for part in (int, float, str) if part is kind or part in get_args(kind))
        group.add_argument(flag, type=number, metavar={int: "N", float: "X", str: "TEXT"}[number], help=text)
