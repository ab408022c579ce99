"""What a step costs: time without what lies between steps, and the share of a machine's FLOPs that the model needs."""

import torch

from tplab.capstone.training import meter as meters
from tplab.capstone.training.meter import Clock, Meter, known_machine


def test_what_lies_between_steps_does_not_count(monkeypatch):
    now = iter([0.0, 10.0, 15.0, 100.0, 104.0])
    monkeypatch.setattr(meters.time, "perf_counter", lambda: next(now))
    clock = Clock()  # 0
    clock.go_on()  # 10
    clock.count()
    clock.count()
    assert clock.mean() == 2.5  # 15
    clock.go_on()  # 100, after a checkpoint
    clock.count()
    assert clock.mean() == 4.0  # 104


class OnAGPU:
    """What a step's marks tell, once the GPU has come to the end of the step."""

    ended = 0  # steps
    made = 0

    def __init__(self) -> None:
        OnAGPU.made += 1
        self.number = OnAGPU.made

    def begin(self) -> None: ...

    end = begin

    @property
    def is_over(self) -> bool:
        return self.number <= OnAGPU.ended

    @property
    def share(self) -> float:
        assert self.is_over
        return self.number / 10


def test_on_a_gpu_the_share_is_that_of_the_newest_step_that_has_ended(monkeypatch):
    monkeypatch.setattr(meters, "StreamWaits", OnAGPU)
    monkeypatch.setattr(OnAGPU, "made", 0)
    meter, found = Meter(torch.device("cuda", 0)), []
    for ended in (0, 0, 2, 2, 4):  # while steps 1 to 5 are handed out
        OnAGPU.ended = ended
        with meter.step():
            pass
        found.append(meter.figures.communication)
    assert found == [None, None, 0.2, 0.2, 0.4]


KNOWN = {"NVIDIA H200": "H200 DGX", "NVIDIA H100 80GB HBM3": "H100 DGX", "NVIDIA A100-SXM4-80GB": "A100 DGX"}
OTHERS = ["NVIDIA GeForce RTX 4090", "NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"]


def test_a_gpu_is_known_by_its_name(monkeypatch):
    for name in [*KNOWN, *OTHERS]:
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        found = known_machine(torch.device("cuda", 0))
        assert (found and found.name) == KNOWN.get(name)
    assert known_machine(torch.device("cpu")) is None
