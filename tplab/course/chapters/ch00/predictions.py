"""Prediction questions of chapter 00, with their answers and explanations."""

from tplab.course.checks import Prediction

PREDICTIONS = {
    "0.a": Prediction(
        question="In which of the two training steps does memory use peak? And in which phase of a step "
        "does the optimizer state first appear: forward (1), backward (2) or optimizer step (3)?",
        answer={"highest_peak_in_step": 2, "optimizer_state_appears_in_phase": 3},
        why="Adam only allocates its state during the first optimizer step. From then on, the state stays, so the "
        "activations of the second step come on top of it, and memory climbs higher than before.",
        wrong={
            "highest_peak_in_step": "What is in memory during the second step that wasn't there during the first?",
            "optimizer_state_appears_in_phase": "When does Adam see a gradient for the first time, so that it has "
            "something to remember?",
        },
    ),
    "0.b": Prediction(
        question="Double the batch b. By what factor do weights, gradients and optimizer state grow, and by what "
        "factor do the activations grow? Double the sequence length s instead. By what factor do the "
        "attention scores grow?",
        answer={"states": 1, "activations": 2, "scores": 4},
        why="The states belong to the parameters, which never see the data. All activations have a factor of b. The "
        "scores have the shape [b, a, s, s], so s counts twice.",
        wrong={
            ("states", 2): "Does a weight get a second copy when more data flows through it?",
            "states": "How does the number of weights depend on the batch?",
            "activations": "Look at the formula. How often does b appear in it?",
            ("scores", 2): "The scores have the shape [b, a, s, s]. How often does s appear in it?",
            "scores": "What becomes of s · s if you double s?",
        },
    ),
    "0.c": Prediction(
        question="A loop runs total = total + loss over 12 batches. How many batches' activations are in memory "
        "at the end of a validation loop, and how many at the end of a training loop that calls "
        "loss.backward() on each loss first?",
        answer={"validation": 12, "training": 0},
        why="The graph of `total` reaches back into every batch, and nothing is freed because there's no "
        "backward pass. That's why the memory grew like a staircase. In a training loop, backward() frees "
        "the activations of its batch right away. There, the same line only leaks small graph nodes, and "
        "hardly anyone notices.",
        wrong={
            ("validation", 1): "`total` depends on all losses, not only on the last one.",
            "validation": "Which batches does `total` depend on at the end of the loop?",
            ("training", 12): "What does backward() do to the activations that it has used?",
            "training": "What happens to the activations of a batch when backward() is through with them?",
        },
    ),
    "0.d": Prediction(
        question="GPT-3 has 175 billion parameters. How many 80 GB GPUs hold just the weights, at 2 bytes each? How "
        "many hold everything but the activations for training, at 16 bytes each?",
        answer={"gpus_to_answer": 5, "gpus_to_train": 35},
        why="350 GB / 80 GB is 4.4, so you need 5 GPUs. 2,800 GB / 80 GB is 35. Training takes eight times the memory "
        "of the weights, and the activations come on top of that.",
        wrong={
            ("gpus_to_answer", 4): "350 GB is more than 4 · 80 GB, and you can't buy 0.4 of a GPU.",
            (
                "gpus_to_answer",
                35,
            ): "That's for 16 bytes per parameter. Which of them does a model need that only answers questions?",
            "gpus_to_answer": "How often does 80 GB go into 175 · 2 billion bytes? Round up to whole GPUs.",
            (
                "gpus_to_train",
                5,
            ): "That's enough for the weights. What else do you need for each of them when you train with Adam?",
            "gpus_to_train": "How often does 80 GB go into 175 · 16 billion bytes?",
        },
    ),
    "0.e": Prediction(
        question="A layer of GPT-3 saves 34 + 80 = 114 bytes for each of its s·b·h elements. How many are left on each "
        "of 8 tensor-parallel ranks?",
        answer={"bytes": 23},
        why="10 + 24/8 + 80/8 = 10 + 3 + 10 = 23. You pay for eight times as many GPUs, and each of them saves only "
        "five "
        "times less, because the 10 doesn't shrink.",
        wrong={
            ("bytes", 14.25): "114/8 would be right if everything were divided by 8. Which term has no p below it?",
            ("bytes", 114): "That's the layer on a single GPU.",
            ("bytes", 93): "The scores belong to heads, and each rank has only some of the heads.",
            ("bytes", 44): "You divided the scores, but not the rest. What does the formula do with the 34?",
            "bytes": "Put p = 8 and 5as/h = 80 into 10 + 24/p + 5as/(hp).",
        },
    ),
}
