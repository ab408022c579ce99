"""Write the text of the learner's train.py, with the settings of the newest run that they made with the capstone."""

import re
from pathlib import Path
from typing import Any

import yaml

from tplab.course.learn.given_code import TEMPLATES

SCRIPT = "train.py"
_RUNS = "runs/*/settings.yaml"  # where the capstone keeps the settings of a run
_NAMES = (  # settings that train.py has, too
    "tp", "num_layers", "hidden_size", "num_heads", "seq_length", "precision", "steps", "batch_size", "learning_rate",
    "min_learning_rate", "warmup_steps", "weight_decay", "max_norm", "seed", "keep",
)  # fmt: skip
_ONLY = {  # settings of the capstone for which train.py supports only one value, with that value
    "num_kv_heads": None, "ffn_hidden_size": None, "activation": "gelu", "gated": False, "bias": True,
    "qkv_bias": False, "tied_embedding": True, "learned_positions": True, "sliding_window": None, "norm_eps": 1e-5,
    "start_from": None,
}  # fmt: skip


def train_script(folder: Path) -> str:
    """Return the text of train.py for the learner's folder.

    It has the course's default settings if the folder's runs/ has no run that train.py can repeat.
    """
    text = (TEMPLATES / SCRIPT).read_text(encoding="utf-8")
    paths = sorted(folder.glob(_RUNS), key=lambda path: path.stat().st_mtime, reverse=True)
    run = next((path for path in paths if settings_of(path)), None)
    if not run:
        return text
    for name, value in settings_of(run).items():
        text = re.sub(rf"(?m)^(    {name}: \w+ = )[^#\n]*?(  #.*)?$", rf"\g<1>{value!r}\g<2>", text)
    return text.replace("class Settings:\n", f'class Settings:\n    """As in {run.relative_to(folder)}."""\n\n', 1)


def settings_of(path: Path) -> dict[str, Any]:
    """Return the settings with which train.py repeats a run, or {} if train.py can't repeat it."""
    try:
        run = yaml.safe_load(path.read_text(encoding="utf-8"))
        if any(run.get(name, only) != only for name, only in _ONLY.items()):
            return {}
        found: dict[str, Any] = {name: run[name] for name in _NAMES}
        found["micro_batches"] = run["batch_size"] // run["dp"] // run["micro_batch_size"]
        if run["data"]:
            found["text"] = str(Path(run["data"]).absolute())
        if run["data_limit"]:
            found["megabytes"] = run["data_limit"] / 1e6
    except (OSError, ValueError, TypeError, LookupError, ArithmeticError, yaml.YAMLError):
        return {}  # the file is from another version, or was edited by hand
    numbers = all(isinstance(value, (int, float)) for name, value in found.items() if name not in ("precision", "text"))
    return found if numbers and found["precision"] in ("float32", "bfloat16") else {}
