"""Hooks on the modules of a ParallelGPT see what the modules return, and no later operation overwrites it."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode

from tplab import launch
from tplab.gpt.model import ParallelGPT
from tplab.memory.config import GPTConfig
from tplab.sequence.gpt import SequenceParallelGPT

CONFIG = GPTConfig(num_layers=2, hidden_size=16, num_heads=4, seq_length=8, vocab_size=40, dropout=0.0)
IDS = torch.arange(16).view(2, 8) * 7 % 40


def made(model_class) -> nn.Module:
    torch.manual_seed(0)
    model = model_class(CONFIG, dtype=torch.float64)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.ones_(parameter)
    return model


def _hooked(model_class):
    """For each module: whether its output stayed the same, and how much patching it in changes the logits."""
    model, found = made(model_class), {}
    for name, module in model.named_modules():
        if not name or isinstance(module, nn.ModuleList):
            continue
        kept = {}

        def keep(_, inputs, output, kept=kept):
            kept["output"], kept["copy"] = output, [part.clone() for part in parts(output)]

        def patch(_, inputs, output, kept=kept):
            return kept["output"]

        with torch.no_grad():
            hook = module.register_forward_hook(keep)
            logits = model(IDS, gather=True)
            hook.remove()
            same = all(map(torch.equal, parts(kept["output"]), kept["copy"]))
            hook = module.register_forward_hook(patch)
            found[name] = same, float((model(IDS, gather=True) - logits).abs().max())
            hook.remove()
    return found


def parts(output):
    return output if isinstance(output, tuple) else (output,)


def _backward_hooked(model_class):
    model, called = made(model_class), []
    names = [name for name, module in model.named_modules() if name and not isinstance(module, nn.ModuleList)]
    for name in names:
        model.get_submodule(name).register_full_backward_hook(lambda *_, name=name: called.append(name))
    model(IDS, IDS).backward()
    with CommDebugMode():
        model(IDS, IDS).backward()
    return [name for name in names if name not in called]


@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("model_class", [ParallelGPT, SequenceParallelGPT])
def test_what_a_hook_keeps_stays_and_patching_it_in_changes_nothing(model_class, p):
    for found in launch(_hooked, p, args=(model_class,)):
        assert {"layers.0.attention", "layers.1.mlp", "layers.0.attention.out", "embedding"} <= found.keys()
        assert {name: outcome for name, outcome in found.items() if outcome != (True, 0.0)} == {}


@pytest.mark.parametrize("p", [1, 2])
def test_full_backward_hooks_and_comm_debug_mode_work_on_every_module(p):
    assert launch(_backward_hooked, p, args=(ParallelGPT,)) == [[]] * p
