"""Prediction questions of chapter 00, with their answers and explanations."""

from tplab.course.checks import Prediction

PREDICTIONS = {
    "0.a": Prediction(
        question="In which of the two training steps does memory use peak? In which phase of a step does the optimizer "
        "state first appear? (Phase 1 is the forward pass, phase 2 is the backward pass, and phase 3 is the optimizer "
        "step.)",
        answer={"highest_peak_in_step": 2, "optimizer_state_appears_in_phase": 3},
        why="Adam allocates its state during the first optimizer step and never frees it. In the second step, the "
        "activations come on top of the optimizer state, so memory use climbs higher than before.",
        wrong={
            "highest_peak_in_step": "What is in memory during the second step that wasn't in memory during the first "
            "step?",
            "optimizer_state_appears_in_phase": "Adam computes its state from gradients. In which phase does Adam "
            "first use a gradient?",
        },
    ),
    "0.b": Prediction(
        question="Suppose you double the batch size b. By what factor does the total size of the weights, gradients, "
        "and optimizer state grow? By what factor do the activations grow? Now suppose you double the sequence length "
        "s instead. By what factor does the memory for the attention scores grow?",
        answer={"states": 1, "activations": 2, "scores": 4},
        why="The weights, gradients, and optimizer state depend only on the number of parameters, which doesn't "
        "change. All activations are proportional to b. The scores have the shape [b, a, s, s], so they grow with the "
        "square of s.",
        wrong={
            ("states", 2): "Does the model get a second copy of its weights when you feed it twice as much data?",
            "states": "Does the number of weights depend on the batch size?",
            "activations": "How many times does b appear in the formula for the activations?",
            ("scores", 2): "The scores have the shape [b, a, s, s]. How many times does s appear in that shape?",
            "scores": "What happens to s · s when you double s?",
        },
    ),
    "0.c": Prediction(
        question="A loop executes total = total + loss for each of 12 batches. At the end of a validation loop, how "
        "many batches still have their activations in memory? A training loop also calls loss.backward() on every "
        "batch. At the end of a training loop, how many batches still have their activations in memory?",
        answer={"validation": 12, "training": 0},
        why="The graph of `total` reaches back to every batch. In a validation loop, there's no backward pass that "
        "would free the activations, so memory use climbs like a staircase. In a training loop, backward() frees each "
        "batch's activations right away. The same line of code then leaks only small graph nodes, and hardly anyone "
        "notices the leak.",
        wrong={
            ("validation", 1): "`total` depends on all the losses, not just on the last loss.",
            "validation": "When the loop ends, which batches does `total` depend on?",
            ("training", 12): "What does backward() do with the activations once it has used them?",
            "training": "What happens to the activations of a batch when backward() no longer needs them?",
        },
    ),
    "0.d": Prediction(
        question="GPT-3 has 175 billion parameters. How many 80 GB GPUs do you need just to hold the weights, at 2 "
        "bytes each? How many 80 GB GPUs do you need to train the model, at 16 bytes per parameter and not counting "
        "activations?",
        answer={"gpus_to_answer": 5, "gpus_to_train": 35},
        why="The weights take 350 GB, which is 4.4 times 80 GB, so you need 5 GPUs. Training takes 2,800 GB, which is "
        "35 times 80 GB. That's eight times as much memory as the weights take, and the activations come on top of "
        "that.",
        wrong={
            ("gpus_to_answer", 4): "The weights need 4.4 GPUs, and you can't buy 0.4 of a GPU.",
            (
                "gpus_to_answer",
                35,
            ): "That would be right at 16 bytes per parameter. How many of those bytes does a model need if it only "
            "answers questions?",
            "gpus_to_answer": "Multiply 175 billion parameters by 2 bytes, divide the result by 80 GB, and round up "
            "to whole GPUs.",
            (
                "gpus_to_train",
                5,
            ): "Five GPUs are enough for the weights. What else do you have to store for each weight when you train "
            "with Adam?",
            "gpus_to_train": "Multiply 175 billion parameters by 16 bytes, and divide the result by 80 GB.",
        },
    ),
    "0.e": Prediction(
        question="A layer of GPT-3 saves 34 + 80 = 114 bytes for each of its s·b·h elements. If you split the layer "
        "over 8 tensor-parallel ranks, how many bytes per element does each rank have to store?",
        answer={"bytes": 23},
        why="The result is 10 + 24/8 + 80/8 = 23. You pay for eight times as many GPUs, but each GPU still stores a "
        "fifth of the bytes, because the 10 isn't divided by p.",
        wrong={
            ("bytes", 14.25): "You divided everything by 8. Which term of the formula isn't divided by p?",
            ("bytes", 114): "That's how much the layer stores on a single GPU. Which terms of the formula are divided "
            "by p?",
            (
                "bytes",
                93,
            ): "You didn't divide the scores. Every head has its own scores, and each rank has only some of the heads.",
            (
                "bytes",
                44,
            ): "You divided the scores by 8, but not the other terms. What happens to the 34 in the formula?",
            "bytes": "Plug p = 8 and 5as/h = 80 into the formula 10 + 24/p + 5as/(hp).",
        },
    ),
}
