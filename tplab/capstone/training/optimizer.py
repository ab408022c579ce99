"""AdamW as usually configured for language models.

Norms and biases gain nothing from being smaller, so only matrices decay, as in GPT-3 and Megatron. (Loshchilov and
Hutter 2019, "Decoupled weight decay regularization".)
"""

from typing import Any

from torch import nn

from tplab.capstone.settings.settings import Settings


def adamw_options(model: nn.Module, settings: Settings) -> dict[str, Any]:
    """Return AdamW's options and its `parameters`, in groups. If torch has a fused kernel, it updates a whole group."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return {
        "parameters": [group for group in groups if group["params"]],
        "lr": settings.learning_rate,
        "betas": (settings.beta1, settings.beta2),
        "fused": all(p.device.type in ("cpu", "cuda") for p in parameters),
    }
