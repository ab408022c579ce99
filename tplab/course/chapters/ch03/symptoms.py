"""The table of symptoms and their causes at the end of chapter 03's "Break it" section."""

from tplab.course.checks import Symptom

SYMPTOMS = [
    Symptom(
        "Outputs and weight gradients are right, but the gradient of the input is wrong, and different on each rank",
        "f is missing, or its backward adds nothing, so each rank only sees its own path",
        "3.2",
    ),
    Symptom(
        "All gradients below some point are exactly p times too large",
        "g adds in the backward pass as well, so one loss is counted p times",
        "3.3",
    ),
    Symptom(
        "The output is right, and a gradient after exp, sigmoid, softmax, ... is silently wrong",
        "A collective wrote into a tensor that autograd had saved",
        "3.4",
    ),
    Symptom(
        "The process dies, or unrelated values change, in the backward of .sum() or .mean()",
        "An in-place collective got an expanded gradient and wrote past its end",
        "3.2",
    ),
    Symptom(
        "It works with contiguous tensors, but other tensors come back without being summed",
        "all_reduce(x.contiguous()) summed a copy, and x was returned",
        "3.4",
    ),
    Symptom(
        "The gradient is zero outside this rank's columns",
        "scatter's backward pads with zeros where it should gather",
        "3.3",
    ),
    Symptom(
        "A gradient is None",
        "backward returned what dist.all_reduce returns",
        "3.2",
    ),
]
