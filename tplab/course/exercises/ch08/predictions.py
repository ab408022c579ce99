"""Prediction questions of chapter 08, with their answers and explanations."""

from tplab.course.checks import Prediction

PREDICTIONS = {
    "8.a": Prediction(
        question="1024 tokens, a vocabulary of 32768, float32 (4 bytes a number): how many bytes has the message if "
        "all logits are gathered, and how many have the three all-reduces together?",
        answer={"gather": 134217728, "all_reduces": 12288},
        why="1024 · 32768 · 4 bytes, all parts together, against 3 · 1024 · 4 bytes: v/3 times less. And neither "
        "depends on p.",
        wrong={
            "gather": "The message of an all-gather is the gathered tensor, [n, v]. How many bytes is that?",
            ("gather", 33554432): "That is how many numbers there are. How many bytes has each?",
            ("gather", 67108864): "That is one rank's part with p = 2. All parts together count.",
            "all_reduces": "Three numbers for each token: the maximum, the sum, the target's logit.",
            ("all_reduces", 3072): "That is how many numbers there are. How many bytes has each?",
            ("all_reduces", 4096): "That is one of the three.",
        },
    ),
    "8.b": Prediction(
        question="Two ranks; rank 0 has the logits [0, 0], rank 1 has [100, 100]. Each rank subtracts its own maximum, "
        "takes exp, and the sums are added up. Which sum comes out? And which, to a whole number, if both subtract the "
        "maximum of all, 100?",
        answer={"own_maximum": 4, "common_maximum": 2},
        why="With its own maximum each rank puts in exp(0) + exp(0) = 2, as if its logits counted as much as the "
        "other's. With the maximum of all, rank 0 puts in 2 exp(-100), which is nothing, and rank 1 puts in 2.",
        wrong={
            "own_maximum": "Subtract 0 on rank 0, and 100 on rank 1. Which four numbers go into exp?",
            "common_maximum": "Subtract 100 on both. Which four numbers go into exp, and what is exp(-100)?",
            ("common_maximum", 4): "exp(0 - 100) is not 1.",
        },
    ),
    "8.c": Prediction(
        question="One token, 4 ranks, the target in rank 2's columns, an upstream gradient of 1. How many collectives "
        "does the backward need? What is the sum of the logits' gradient over all columns of all ranks? On which ranks "
        "is the sum over the rank's own columns negative?",
        answer={"collectives": 0, "sum": 0, "negative_on": [2]},
        why="Softmax and one-hot both add up to 1 over all columns, so their difference adds up to 0. On rank 2 it is "
        "negative (its share of the softmax minus 1), on the others positive. Each rank has all it needs.",
        wrong={
            "collectives": "The gradient in this rank's columns is exp(z - lse) minus one-hot. Which of these does a "
            "rank not have after the forward pass?",
            "sum": "What do the softmax's numbers add up to, over all columns? And those of one-hot?",
            ("sum", 1): "That is the softmax alone. One-hot is subtracted.",
            ("sum", -3): "That would be so if every rank subtracted 1. Only one has the target.",
            "negative_on": "Softmax is positive everywhere. Which rank subtracts something?",
        },
    ),
    "8.d": Prediction(
        question="A batch of 8 tokens, 3 of them with the target ignore_index: by how many is the sum of the losses "
        "divided? And: 15 ids, padded to 16 columns, every logit 0. The loss is the logarithm of which number? Of "
        "which if the padded column takes part?",
        answer={"divided_by": 5, "log_of": 15, "with_padding": 16},
        why="The mean is over the tokens that count. With equal logits each id has the probability 1/15, so the loss "
        "is ln 15 = 2.7081. A padded column that takes part gets a probability too: ln 16 = 2.7726.",
        wrong={
            "divided_by": "An ignored token has no loss. Should it pull the mean down as if its loss were 0?",
            "log_of": "exp(0) = 1 for each id. How many of them does the sum have?",
            "with_padding": "How many columns are there with the padding?",
        },
    ),
}
