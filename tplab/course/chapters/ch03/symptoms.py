"""The table of symptoms and their causes at the end of chapter 03's "Break it" section."""

from tplab.course.checks import Symptom

SYMPTOMS = [
    Symptom(
        "Outputs and weight gradients right; only the gradient of the input is wrong, and differs between ranks",
        "f is missing, or its backward adds nothing: each rank sees its own path only",
        "3.1",
    ),
    Symptom(
        "All gradients below a point are exactly p times too large",
        "g adds backward as well: one loss was counted p times",
        "3.2",
    ),
    Symptom(
        "Output right, gradient silently wrong, after exp, sigmoid, softmax, ...",
        "A collective wrote into a tensor that autograd had saved",
        "3.2",
    ),
    Symptom(
        "The process dies, or numbers elsewhere change, in the backward of .sum() or .mean()",
        "An in-place collective on an expanded gradient: it writes past its end",
        "3.1",
    ),
    Symptom(
        "Right with contiguous tensors, not reduced at all with others",
        "all_reduce(x.contiguous()) reduced a copy, and x was returned",
        "3.2",
    ),
    Symptom(
        "The gradient is zero outside this rank's columns",
        "scatter's backward padded with zeros where it should gather",
        "3.3",
    ),
    Symptom(
        "Gradient None",
        "backward returned what dist.all_reduce returns",
        "3.1",
    ),
]
