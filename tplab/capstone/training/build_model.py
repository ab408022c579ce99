"""Build the model that a run trains. Its layers are the course's, the learner's, or plain ones.

    layers      parameters are        the gradient norm is from
    "tplab"     shards                tplab.data.grad_norm
    "mine"      shards                the learner's 14.4
    "plain"     full, on one rank     tplab.data.grad_norm

With pp > 1, which requires layers="tplab", the model is this rank's pipeline stage.

Initial weights are drawn the way `ParallelGPT` draws them, in float32 on the CPU. A seed therefore gives the same model
with all kinds of layers, on any number of ranks, on a GPU, and in float64.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from tplab import plain
from tplab.capstone.model import TrainingHooks, copy_shards
from tplab.capstone.own_layers.find import Answers
from tplab.capstone.settings.settings import Settings
from tplab.cluster.training_step import TrainingStep
from tplab.collectives.by_hand import rank_and_size
from tplab.gpt.model import ParallelGPT
from tplab.memory.config import GPTConfig
from tplab.pipeline.stages import gpt_stages
from tplab.sequence.gpt import SequenceParallelGPT
from tplab.tensor.full_state import full_state_dict, load_full_state_dict
from tplab.tensor.linear import Device


def build_model(
    settings: Settings, config: GPTConfig, *, mesh: DeviceMesh | None = None, device: Device = None,
    answers: Answers | None = None,
) -> nn.Module:  # fmt: skip
    """Build a model. `model(ids, targets)` returns the mean loss, which is the same on every rank of a replica.

    If there are several pipeline stages, returns this rank's `GPTStage`.

    config     settings.model, possibly with the vocabulary size of the tokenizer
    mesh       as created by `tplab.data.grid.mesh`, or None if a single rank has the full model
    answers    the result of `tplab.capstone.own_layers.find.find_answers`, for layers="mine"

    The process's random state doesn't change. Raises ValueError if the layers don't support the settings.
    """
    group = None if mesh is None else mesh.get_group("tp")
    if (p := rank_and_size(group)[1]) != settings.tp:
        raise ValueError(f"tp={settings.tp} ranks should share the model, but there are {p}")
    if mesh is None and p > 1:
        raise ValueError(f"{p} ranks need a mesh: pass mesh=tplab.data.grid.mesh(dp={settings.dp}, tp={settings.tp})")
    if mesh is not None and mesh["pp"].size() != settings.pp:
        raise ValueError(f"pp={settings.pp} stages should share the layers, but the mesh has {mesh['pp'].size()}")
    dtype = torch.float64 if settings.precision == "float64" else torch.float32
    gpus = [device] if device is not None and torch.device(device).type == "cuda" else []
    with torch.random.fork_rng(devices=gpus):
        torch.default_generator.manual_seed(settings.seed)
        cut = settings.sequence_parallel and settings.layers == "tplab"
        whole = (SequenceParallelGPT if cut else ParallelGPT)(
            config, recompute=settings.recompute, async_grad_allreduce=settings.async_grad_allreduce, group=group,
            device="cpu", dtype=torch.float32,
        ).to(dtype=dtype)  # fmt: skip
        drawn: nn.Module = whole
        if mesh is not None and settings.pp > 1:
            drawn = gpt_stages(whole, settings.layers_of_stages)[mesh.get_local_rank("pp")]
        drawn.hooks = TrainingHooks(config=config, group=group)  # type: ignore[assignment]
        if settings.layers == "tplab":
            return drawn.to(device=device)
        if settings.layers == "plain":
            model: nn.Module = plain.GPT(replace(config, flash_attention=True), device=device, dtype=dtype)
            model.load_state_dict(full_state_dict(drawn, group))
            model.hooks = TrainingHooks(config=config)  # type: ignore[assignment]
            return model
        from tplab.capstone.own_layers.build import assemble

        if answers is None or mesh is None:
            raise ValueError(
                'layers="mine" needs answers=find_answers(Path("my_course"), settings) and, even for a single rank, a '
                "process group and its mesh, because your layers ask torch.distributed for their rank"
            )
        model = assemble(answers, config, mesh=mesh, device=device, dtype=dtype)
        copy_shards(drawn, model)
        return model


def training_step(
    model: nn.Module, optimizer_class: Callable[..., Optimizer], mesh: DeviceMesh | None = None, **options: Any
) -> TrainingStep:
    """Return the `TrainingStep` for a model. `options` are options for the step and for the optimizer."""
    hooks: TrainingHooks = model.hooks  # type: ignore[assignment]
    return TrainingStep(model, optimizer_class, mesh=mesh, norm=hooks.norm, **options)


def for_generation(model: nn.Module) -> ParallelGPT:
    """Return a model for `tplab.gpt.generation.generate`. Don't store it, because its weights may be a copy."""
    if isinstance(model, ParallelGPT) and not model.region.sequence_parallel:
        return model
    way: Any = model.hooks
    own = dict(model.named_parameters())
    first = next(iter(own.values()))
    whole = ParallelGPT(way.config, group=way.group, device="meta", dtype=first.dtype)
    if isinstance(model, plain.GPT):  # its embedding table has no padding
        whole = whole.to_empty(device=first.device)
        load_full_state_dict(whole, model.state_dict())
        return whole.eval()
    for name, parameter in own.items():
        path, _, last = name.rpartition(".")
        shared = nn.Parameter(parameter.detach(), requires_grad=False)
        whole.get_submodule(path).register_parameter(last, shared)
    return whole.eval()
