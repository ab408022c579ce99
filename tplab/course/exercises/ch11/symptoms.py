"""The table of symptoms at the end of chapter 11's "Break it" section.

Each row names a symptom, which is what a learner may see, and the mistake that causes it.
"""

from tplab.course.checks import Symptom

SYMPTOMS = [
    Symptom(
        see="The input's gradient is wrong, now more and now less; right as soon as one looks with a debugger",
        cause="An asynchronous all-reduce that nobody waited for before its tensor was read",
        exercise="11.3",
    ),
    Symptom(
        see="Gradients right, and the backward pass as long as with a blocking all-reduce",
        cause="The rank waits right after it has started the all-reduce, or starts it when nothing is left to compute",
        exercise="11.3",
    ),
    Symptom(
        see="In the trace the collective lies beside a product, and both take longer than alone",
        cause="They share something: a CPU's cores, the memory's bandwidth, the processors of a GPU on which NCCL runs",
    ),
    Symptom(
        see="More ranks, less time for each product, the same time for the layer",
        cause="Communication does not shrink with p: the layer is too small, or the link too slow, for so many ranks",
        exercise="11.4",
    ),
    Symptom(
        see="Fast inside a node, several times slower with one rank more",
        cause="The ring now crosses the network, and its slowest link sets the pace of every step",
        exercise="11.1",
    ),
    Symptom(
        see="A predicted time that is too short, by nearly the same factor everywhere",
        cause="The rate is the vendor's peak: real products reach a part of it. Measure one, or set the fraction",
        exercise="11.2",
    ),
]
