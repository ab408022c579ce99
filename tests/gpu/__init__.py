"""The course's layers on GPUs, against plain torch there and on the CPU. On a machine with any GPU, in a few minutes:

    pip install torch cloudpickle psutil pyyaml tokenizers pytest pytest-timeout pytest-xdist      # what isn't there
    python -m pytest -m gpu tests/gpu tests/runtime tests/tensor
    python -m benchmarks.gpu_check      # these tests and measurements, in order of worth, with a report

CI runs nearly all of it on emulated GPUs (tests/emulated_gpu).

What is compared, on each rank: the parallel layer, the same in plain torch on the same device and in the same dtype,
and plain torch in float64 on the CPU. The programs know nothing of GPUs: tests/gpu/test_on_the_cpu.py runs the very
same ones with gloo on the CPU, in every CI, so that what a GPU test runs has run before.

    subject         what a case is, and how far apart its results are
    plain           the layers in plain torch
    layers          cases: rings, linear, MLP, attention, embedding, losses
    models          cases: GPTs, dropout, a compiled layer
    implementations backends and devices, and which cases can run on them
    waiting         one rank waits for another
    first_losses    the capstone's
"""

import os

import pytest

real_gpu = pytest.mark.skipif("EMULATED_GPUS" in os.environ, reason="needs a real GPU: its profiler, speed, or Triton")
