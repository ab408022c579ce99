"""The table of symptoms and their causes at the end of chapter 03's "Break it" section."""

from tplab.course.checks import Symptom

SYMPTOMS = [
    Symptom(
        "Outputs and weight gradients are right, but the gradient of the input is wrong and differs between ranks",
        "f is missing, or its backward pass doesn't sum, so each rank only sees its own path",
        "3.2",
    ),
    Symptom(
        "All gradients before a certain layer are exactly p times too large",
        "g sums in the backward pass as well, so one loss is counted p times",
        "3.3",
    ),
    Symptom(
        "The output is right, but a gradient that goes through exp, sigmoid, softmax, ... is silently wrong",
        "A collective wrote into a tensor that autograd had saved",
        "3.4",
    ),
    Symptom(
        "The process dies, or unrelated values change, in the backward pass of .sum() or .mean()",
        "An in-place collective received an expanded gradient and wrote past the end of its memory",
        "3.2",
    ),
    Symptom(
        "Contiguous tensors are summed, but other tensors are returned unchanged",
        "all_reduce(x.contiguous()) summed a copy, and x was returned",
        "3.4",
    ),
    Symptom(
        "The gradient is zero outside this rank's columns",
        "The backward pass of scatter pads with zeros instead of gathering",
        "3.3",
    ),
    Symptom(
        "A gradient is None",
        "backward returned the result of dist.all_reduce, which is None",
        "3.2",
    ),
]
