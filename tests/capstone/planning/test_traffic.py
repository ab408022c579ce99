"""What a step sends, by formula, beside the record of a real step: every kind, every call, every byte."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.capstone.small import LLAMA
from tplab import launch
from tplab.capstone.planning.traffic import step_parts
from tplab.capstone.settings.settings import Settings
from tplab.capstone.training.build_model import build_model
from tplab.capstone.training.ranks import join
from tplab.capstone.training.step import Step
from tplab.runtime import Record, Total, record

TINY = Settings(num_layers=2, hidden_size=32, num_heads=4, seq_length=16, vocab_size=300, steps=10,
                batch_size=4, micro_batch_size=2, tp=2)  # fmt: skip
OTHERS: dict[str, dict[str, Any]] = {
    "tensor parallel": {},
    "one micro-batch, longer than a block": {"batch_size": 34, "micro_batch_size": 34, "vocab_size": 16384},
    "gradients not overlapped": {"async_grad_allreduce": False},
    "layers again": {"recompute": "layers"},
    "layers again, with dropout": {"recompute": "layers", "dropout": 0.1},
    "attention again": {"recompute": "attention"},
    "sequence parallel": {"sequence_parallel": True},
    "sequence parallel, layers again, with dropout": {"sequence_parallel": True, "recompute": "layers", "dropout": 0.1},
    "bfloat16": {"precision": "bfloat16"},
    "bfloat16, not overlapped": {"precision": "bfloat16", "async_grad_allreduce": False},
    "bfloat16, sequence parallel, not overlapped": {
        "precision": "bfloat16", "sequence_parallel": True, "async_grad_allreduce": False,
    },
    "float64": {"precision": "float64", "sequence_parallel": True},
}  # fmt: skip
REPLICAS: dict[str, dict[str, Any]] = {
    "replicas": {"tp": 1, "dp": 2},
    "no clipping": {"tp": 1, "dp": 2, "max_norm": 0.0},
    "more than one bucket": {"tp": 1, "dp": 2, "hidden_size": 256, "num_layers": 9},
    "a llama": LLAMA,
}
SETTINGS = {name: replace(TINY, **other) for name, other in (OTHERS | REPLICAS).items()}
ON_FOUR = {"a mesh": replace(TINY, dp=2, sequence_parallel=True), "a llama's mesh": replace(TINY, dp=2, **LLAMA)}


def one_step(runs: dict[str, Settings]) -> dict[str, dict[str, Total]]:
    """The calls and bytes of a step of each run on this rank, by the kind of collective."""
    found = {}
    for name, settings in runs.items():
        ranks = join(settings)
        model = build_model(settings, settings.model, mesh=ranks.mesh, device=ranks.device)
        step = Step(model, settings, ranks)
        own = settings.batch_size // settings.dp
        ids = torch.randint(settings.vocab_size, (own, settings.seq_length), generator=torch.Generator().manual_seed(1))
        with record() as section:
            step.run(1, ids, ids)
        found[name] = Record(list(section)).totals()
    return found


@pytest.fixture(scope="module")
def recorded() -> list[dict[str, dict[str, Total]]]:
    both, four = (launch(one_step, p, args=(of_p,), timeout=240) for p, of_p in ((2, SETTINGS), (4, ON_FOUR)))
    return [*both, *four]


@pytest.mark.parametrize(("name", "settings"), (SETTINGS | ON_FOUR).items(), ids=[*SETTINGS, *ON_FOUR])
def test_the_formula_is_what_a_rank_sends(recorded, name: str, settings: Settings):
    expected: dict[str, Total] = {}
    for part in step_parts(settings):
        calls, size = expected.get(part.kind, Total(0, 0))
        expected[part.kind] = Total(calls + part.calls, size + part.bytes)
    of_ranks = [of_rank[name] for of_rank in recorded if name in of_rank]
    assert of_ranks == settings.ranks * [expected]
    assert step_parts(replace(TINY, tp=1)) == []
