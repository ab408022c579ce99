"""A GPT of Megatron-Core's layers, for `benchmarks.gpu`.

Only the attention within a head isn't Megatron-Core's. It's torch's, as in all other ways to compute a step.
"""

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tplab.capstone.model import TrainingHooks
from tplab.capstone.settings.settings import Settings
from tplab.capstone.training.build_model import build_model
from tplab.memory.config import GPTConfig

NAMES = {  # ours, and Megatron-Core's
    "embedding": "embedding.word_embeddings", "positions": "embedding.position_embeddings",
    "layers": "decoder.layers", "final_norm": "decoder.final_layernorm", "attention_norm": "input_layernorm",
    "attention.qkv": "self_attention.linear_qkv", "attention.out": "self_attention.linear_proj",
    "mlp_norm": "pre_mlp_layernorm", "mlp.up": "mlp.linear_fc1", "mlp.down": "mlp.linear_fc2",
}  # fmt: skip


class CausalCore(nn.Module):
    """The attention within a head, with Megatron-Core's interface: q, k, v [s, b, n, d] -> [s, b, n d]."""

    def __init__(self, **_: Any) -> None:
        super().__init__()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Tensor:
        q, k, v = (part.permute(1, 2, 0, 3) for part in (q, k, v))  # [b, n, s, d]
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).permute(2, 0, 1, 3).flatten(2)


def start() -> None:
    """Start Megatron-Core, unless it has started. On a CPU, it asks for the number of the GPU even if it needs none."""
    warnings.filterwarnings("ignore", module="megatron")  # it warns that Transformer Engine and Apex are missing
    from megatron.core import parallel_state

    if not torch.cuda.is_available():
        torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()


class MegatronGPT(nn.Module):
    """A GPT of Megatron-Core's layers on one rank, with the capstone's interface: ids and targets [b, s] -> mean loss.

    weights    the initial weights, in the plain GPT's layout
    """

    def __init__(self, config: GPTConfig, weights: dict[str, Tensor], device: Any = "cpu") -> None:
        super().__init__()
        start()
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.transformer import TransformerConfig

        layer = get_gpt_layer_local_spec()
        layer.submodules.self_attention.submodules.core_attention = CausalCore
        options = TransformerConfig(
            num_layers=config.num_layers, hidden_size=config.hidden_size, num_attention_heads=config.num_heads,
            use_cpu_initialization=True, hidden_dropout=0.0, attention_dropout=0.0,
        )  # fmt: skip
        self.model = GPTModel(
            options, layer, config.vocab_size, config.seq_length, share_embeddings_and_output_weights=True,
            position_embedding_type="learned_absolute",
        )  # fmt: skip
        self._load(weights, config.num_heads)
        self.to(device)
        self.hooks = TrainingHooks(config=config)

    @torch.no_grad()
    def _load(self, weights: dict[str, Tensor], num_heads: int) -> None:
        """Copy the weights, with the parts of each name replaced by Megatron-Core's."""
        theirs = dict(self.model.named_parameters())
        for name, full in weights.items():
            other = name
            for ours, their in NAMES.items():
                other = f".{other}.".replace(f".{ours}.", f".{their}.", 1).strip(".")
            if ".qkv." in name:  # its rows are q0 k0 v0, q1 k1 v1, ..
                full = full.unflatten(0, (3, num_heads, -1)).transpose(0, 1).flatten(0, 2)
            theirs.pop(other).copy_(full)
        if theirs:
            raise ValueError(f"these parameters got no weights: {', '.join(theirs)}")

    @property
    def layers(self) -> nn.ModuleList:
        return self.model.decoder.layers

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        return self.model(ids, positions, None, labels=targets).mean()


def build_megatron(settings: Settings, config: GPTConfig, *, device: Any, **_: Any) -> MegatronGPT:
    """Build the model like `build_model`, from the same initial weights."""
    weights = build_model(settings, config, device="cpu").state_dict()
    return MegatronGPT(config, weights, device)
