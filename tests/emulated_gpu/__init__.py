"""GPUs without GPUs: emulated devices and an emulated NCCL, so that CI runs the code path of a GPU machine.

    PYTHONPATH=$PWD/tests/emulated_gpu/site:$PWD EMULATED_GPUS=8 python -m tplab check 4

Every Python process that starts this way has 8 CUDA devices: the notebook, the fork server, and with it each rank.
Tensors on them are real, with values and gradients, but they lie in host memory and the CPU computes on them.

    device.cpp    a tensor type for the CUDA device, compiled in half a minute (build.py), once
    cuda.py       torch.cuda: devices, streams, events, and random numbers that differ from the CPU's
    nccl.py       a backend "nccl" that refuses what NCCL refuses and waits where NCCL waits, and carries data by gloo
    messages.py   which tensors a message still reads or writes, and what the stream waits for

What it shows, and from which source the rule was taken:

    tensors on different devices in one operator        aten's CUDA kernels check this (c10/cuda, TensorIterator.cpp)
    tensors that NCCL refuses                           ProcessGroupNCCL.cpp, getNcclDataType and check_gpu_tensors
    groups that only their members create               distributed_c10d.py, _new_process_group_helper: "we need to
                                                        perform a 'nocolor' split"
    messages whose ranks block each other               ProcessGroupNCCL.cpp, pointToPoint, and NCCL's group.cc
    batches that open different connections             NCCL's transport.cc, ncclTransportP2pSetup
    a rank that isn't blocked by wait()                 ProcessGroupNCCL.cpp, WorkNCCL::synchronizeStream
    tensors used while a message is under way           the documentation of torch.distributed, on async operations
    seeds that mean other numbers than on the CPU       CUDAGeneratorImpl.cpp: Philox

What it can't show: anything about time and memory, a kernel's rounding (TF32, atomics), Triton and torch.compile,
several streams of one rank, pinned memory, drivers, networks, and a fork after CUDA was initialized. Operators run at
once, so a rank may block earlier than on a GPU: at the first operator that needs a message, not when the CPU reads it.
"""

import ctypes
import importlib
import sys


def emulate(gpus: int) -> None:
    """Give this process emulated GPUs. Must be called before torch is imported, because torch looks for CUDA once."""
    assert "torch" not in sys.modules
    from tests.emulated_gpu.build import built, torch_folder

    module, libraries = built(), torch_folder() / "lib"
    for name in ("libtorch_global_deps.so", "libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(libraries / name), ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(module), ctypes.RTLD_GLOBAL)

    import torch

    from tests.emulated_gpu import cuda, nccl
    from tests.emulated_gpu.messages import Messages

    sys.path.append(str(module.parent))
    extension = importlib.import_module("_emulated_gpu")
    messages = Messages(extension)
    cuda.install(extension, gpus, messages)
    nccl.install(extension, messages)
    assert torch.cuda.device_count() == gpus
