"""Hooks on the modules of a ParallelGPT see what the modules return, and no later operation overwrites it."""

import pytest
import torch
from torch import nn

from tplab import launch
from tplab.gpt.model import ParallelGPT
from tplab.memory.config import GPTConfig
from tplab.sequence.gpt import SequenceParallelGPT

CONFIG = GPTConfig(num_layers=2, hidden_size=16, num_heads=4, seq_length=8, vocab_size=40, dropout=0.0)
IDS = torch.arange(16).view(2, 8) * 7 % 40
MODELS = (ParallelGPT, SequenceParallelGPT)


def made(model_class):
    """A model with biases that count, and its modules by name."""
    torch.manual_seed(0)
    model = model_class(CONFIG, dtype=torch.float64)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.ones_(parameter)
    return model, {n: m for n, m in model.named_modules() if n and not isinstance(m, nn.ModuleList)}


def parts(output):
    return output if isinstance(output, tuple) else (output,)


@torch.no_grad()
def _hooked(model_class):
    """For each module: whether its output stayed the same, and how much patching it in changes the logits."""
    (model, modules), found = made(model_class), {}
    for name, module in modules.items():
        outputs: list = []
        hook = module.register_forward_hook(
            lambda _, inputs, out, kept=outputs: kept.append((out, [*map(torch.clone, parts(out))]))
        )
        logits = model(IDS, gather=True)
        hook.remove()
        ((output, copies),) = outputs
        same = all(map(torch.equal, parts(output), copies))
        hook = module.register_forward_hook(lambda *_, output=output: output)
        found[name] = same, float((model(IDS, gather=True) - logits).abs().max())
        hook.remove()
    return found


def _backward_hooked():
    """The modules whose full backward hook isn't called."""
    (model, modules), called = made(ParallelGPT), []
    for name, module in modules.items():
        module.register_full_backward_hook(lambda *_, name=name: called.append(name))
    model(IDS, IDS).backward()
    return sorted(name for name in modules if called.count(name) != 1)


def _everything():
    return [_hooked(model_class) for model_class in MODELS], _backward_hooked()


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # ids need no gradient
def test_what_a_hook_keeps_stays_and_patching_it_in_changes_nothing_and_backward_hooks_work():
    for found, not_called in (_everything(), *launch(_everything, 2, timeout=120)):
        for outcomes in found:
            assert {"layers.0.attention", "layers.1.mlp", "layers.0.attention.out", "embedding"} <= outcomes.keys()
            assert {name: outcome for name, outcome in outcomes.items() if outcome != (True, 0.0)} == {}
        assert not_called == []
