"""The table of symptoms and their causes at the end of chapter 00's "Break it" section."""

from tplab.course.checks import Symptom

SYMPTOMS = [
    Symptom(
        "Building, forward and backward pass; out of memory at the first optimizer step",
        "Adam allocates its state there: 8 bytes a parameter, 12 in mixed precision",
        "0.2",
    ),
    Symptom(
        "The first step passes; out of memory in the second forward or backward pass",
        "Only now are optimizer state and activations there at the same time",
        "0.2",
    ),
    Symptom(
        "Fits with a smaller batch, or shorter sequences",
        "Activations are too large; the scores grow with the square of the sequence",
    ),
    Symptom(
        "A batch of one sequence does not fit either",
        "States are too large: divide the model, by p or by a pipeline",
        "0.3",
    ),
    Symptom(
        "Memory grows with every batch of a loop that only reads",
        "The losses are added up as tensors, which keep every batch's graph: use .item() or torch.no_grad()",
    ),
    Symptom(
        "Twice as many GPUs with data parallelism, and the same error",
        "Every replica holds the whole model",
    ),
    Symptom(
        "p doubled, and memory fell by less than half",
        "Norms, some biases and the activations between the matrices are whole on every rank",
        "0.3",
    ),
]
