"""Everything that a machine with GPUs should tell us, in order of worth, within a few minutes.

    make gpu-check                                              twelve minutes
    python -m benchmarks.gpu_check [--seconds 720] [--report build/gpu-check/report.md]

Another call goes on where the last one stopped, as long as the code, PyTorch and the GPUs are the same. To start over,
delete results.json beside the report. The report is rewritten after every item, so it's readable even if the machine is
taken away. Without a GPU, or on emulated GPUs (tests/emulated_gpu), this is a rehearsal, which runs the same items on
small sizes and says that it's a rehearsal.

    items     what is run, in which order, and for how long
    runner    runs the items, each in a process of its own, and keeps their results from one call to the next
    report    the results as Markdown, without host names, user names and paths
"""
