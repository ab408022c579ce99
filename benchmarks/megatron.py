"""A GPT of Megatron-Core's layers, for `benchmarks.step` and `benchmarks.gpu`.

Only the attention within a head isn't Megatron-Core's. It's torch's, as in all other ways to compute a step.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks import implementations
from benchmarks.implementations import chunks
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


class MegatronGPT(nn.Module):
    """A GPT of Megatron-Core's layers, with the capstone's interface: maps ids and targets [b, s] to the mean loss.

    weights    the full initial weights, of which each rank of the default group gets its shards
    """

    def __init__(self, config: GPTConfig, weights: dict[str, Tensor], device: Any = "cpu") -> None:
        super().__init__()
        implementations.start_megatron()
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

        from benchmarks.attentions import CausalCore

        layer = get_gpt_layer_local_spec()
        layer.submodules.self_attention.submodules.core_attention = CausalCore
        options = implementations.megatron_config(
            config.hidden_size, config.num_heads, hidden_dropout=0.0, attention_dropout=0.0
        )
        options.num_layers = config.num_layers
        self.model = GPTModel(
            options, layer, config.vocab_size, config.seq_length, share_embeddings_and_output_weights=True,
            position_embedding_type="learned_absolute",
        )  # fmt: skip
        load(self.model, weights, NAMES, _shard_for(config))
        self.to(device)
        self.hooks = TrainingHooks(config=config)

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


def _shard_for(config: GPTConfig) -> Callable[[str, Tensor], Tensor]:
    along = chunks(**{"embedding.weight": 0, "up.weight": 0, "up.bias": 0, "out.weight": 1, "down.weight": 1})

    def shard(name: str, full: Tensor) -> Tensor:
        if ".qkv." in name:  # its rows are q0 k0 v0, q1 k1 v1, ..
            by_head = full.unflatten(0, (3, config.num_heads, -1)).transpose(0, 1)  # [n, 3, d, ..]
            return by_head.chunk(dist.get_world_size())[dist.get_rank()].flatten(0, 2)
        return along(".".join(name.split(".")[-2:]), full)

    return shard


@torch.no_grad()
def load(
    model: nn.Module, weights: dict[str, Tensor], names: dict[str, str], cut: Callable[[str, Tensor], Tensor]
) -> None:
    """Give a model the initial weights, with the parts of each name replaced by those of the other library."""
    theirs = dict(model.named_parameters())
    for name, full in weights.items():
        other = name
        for ours, their in names.items():
            parts = f".{other}."
            other = parts.replace(f".{ours}.", f".{their}.", 1).strip(".")
        theirs.pop(other).copy_(cut(name, full))
    if theirs:
        raise ValueError(f"these parameters got no weights: {', '.join(theirs)}")
