"""Everything that a machine with GPUs should tell us, in order of worth, within a few minutes.

    make gpu-check                                              twelve minutes
    python -m benchmarks.gpu_check [--seconds 720] [--report build/gpu-check/report.md] [--fresh]

Another call goes on where the last one stopped, as long as the code, PyTorch and the GPUs are the same. The report is
rewritten every second, so it's readable even if the machine is taken away. Without a GPU, or on emulated GPUs
(tests/emulated_gpu), this is a rehearsal, which runs the same items on small sizes and says that it's a rehearsal.

    items       what is run, in which order, and for how long
    schedule    which item runs next, given the time that is left
    runner      runs an item in a process of its own
    outcomes    the pytest plugin that notes each test's outcome as soon as there is one
    results     what was found so far, kept in a file from one call to the next
    report      the results as Markdown, without host names, user names and paths
"""
