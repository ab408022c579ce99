"""The table of symptoms and their causes at the end of chapter 00's "Break it" section."""

from tplab.course.checks import Symptom

SYMPTOMS = [
    Symptom(
        "The model loads, and it runs out of memory in the first optimizer step",
        "That's where Adam allocates its state: 8 bytes per parameter, or 12 in mixed precision",
        "0.1",
    ),
    Symptom(
        "The first step works, and the second forward or backward pass runs out of memory",
        "Only then do the optimizer state and the activations exist at the same time",
        "0.1",
    ),
    Symptom(
        "The model fits with a smaller batch or shorter sequences",
        "The activations are too large, and the attention scores grow with the square of the sequence length",
    ),
    Symptom(
        "Not even a batch of one sequence fits",
        "Weights, gradients, and optimizer state are too large: split the model, with tensor or pipeline parallelism",
        "0.4",
    ),
    Symptom(
        "Memory grows with every batch of a loop that only evaluates",
        "The losses are added up as tensors, and their graphs keep every batch's activations: use torch.no_grad()",
        "0.3",
    ),
    Symptom(
        "You double the GPUs with data parallelism, and the same error comes back",
        "Every replica holds the full model",
    ),
    Symptom(
        "You double the tensor-parallel size, and memory shrinks by less than half",
        "The norms and the activations between the blocks are replicated on every rank",
        "0.4",
    ),
]
