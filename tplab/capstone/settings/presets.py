"""Presets for a laptop without a GPU (a GPT-2 and a Llama), for one H100, and for eight H100s or A100s."""

from dataclasses import replace
from math import gcd

from tplab.capstone.settings.settings import Settings

_LAPTOP = Settings(
    folder="runs/laptop", vocab_size=2048, num_layers=4, hidden_size=192, num_heads=8, seq_length=128, tp=2,
    steps=1200, batch_size=16, micro_batch_size=16, learning_rate=2e-3, min_learning_rate=2e-4, warmup_steps=60,
    evaluate_every=200, sample_every=300, save_every=300,
)  # fmt: skip

_H100X8 = Settings(
    folder="runs/h100x8", vocab_size=32768, num_layers=24, hidden_size=2048, num_heads=16, seq_length=2048, tp=8,
    sequence_parallel=True, precision="bfloat16", recompute="attention", steps=2000, batch_size=64,
    micro_batch_size=16, learning_rate=3e-4, min_learning_rate=3e-5, warmup_steps=200, log_every=10,
    evaluate_every=200, save_every=500,
)  # fmt: skip

PRESETS: dict[str, Settings] = {
    "laptop": _LAPTOP,
    "llama": replace(  # a small Llama 3, with about as many parameters per layer as "laptop"
        _LAPTOP, folder="runs/llama", num_kv_heads=4, ffn_hidden_size=512, gated=True, bias=False,
        tied_embedding=False, learned_positions=False, rotary_base=500_000.0,
    ),
    "h100x1": Settings(
        folder="runs/h100x1", vocab_size=16384, num_layers=12, hidden_size=768, num_heads=12, seq_length=1024,
        precision="bfloat16", compile=True, steps=2000, batch_size=64, micro_batch_size=32, learning_rate=6e-4,
        min_learning_rate=6e-5, warmup_steps=200, log_every=10, evaluate_every=200, save_every=500,
    ),
    "h100x8": _H100X8,
    "a100x8": replace(_H100X8, folder="runs/a100x8", hidden_size=1536),
}  # fmt: skip


def preset_for(
    gpu: str | None, tp: int | None = None, dp: int | None = None, pp: int | None = None, *, gpus: int = 8
) -> Settings:
    """Return the preset for tp · pp · dp ranks on a machine with `gpus` GPUs named `gpu`. None means no GPU.

    If there are more ranks than GPUs, they run on the CPU, where only the smallest model can be trained. If `dp` or
    `pp` is given, tp is 1 unless it's given, too, and micro-batches are made small enough that each replica has at
    least one per pipeline stage.
    """
    ranks = (tp or 1) * (pp or 1) * (dp or 1)
    if gpu is None or ranks > gpus:
        preset = PRESETS["laptop"]
    elif ranks == 1:
        preset = PRESETS["h100x1"]
    else:
        preset = PRESETS["a100x8" if "A100" in gpu else "h100x8"]
    parts = (dp or 1) * (pp or 1)
    if (dp is None and pp is None) or parts < 1 or preset.batch_size % parts:
        return preset
    micro_batch_size = gcd(preset.micro_batch_size, preset.batch_size // parts)
    return replace(preset, tp=tp or 1, pp=pp or 1, dp=dp or 1, micro_batch_size=micro_batch_size)
