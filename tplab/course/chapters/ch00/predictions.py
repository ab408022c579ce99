"""Prediction questions of chapter 00, with their answers and explanations."""

from tplab.course.checks import Prediction

PREDICTIONS = {
    "0.a": Prediction(
        question="Which of the two training steps has the higher memory peak? In which phase of a step does the "
        "optimizer state first appear? (Phase 1 is the forward pass, phase 2 is the backward pass, and phase 3 is the "
        "optimizer step.)",
        answer={"highest_peak_in_step": 2, "optimizer_state_appears_in_phase": 3},
        why="Adam allocates its state during the first optimizer step and never frees it. In the second step, the "
        "optimizer state is already in memory when the activations are added, so memory use climbs higher than before.",
        wrong={
            "highest_peak_in_step": "What is in memory during the second step that wasn't in memory during the first "
            "step?",
            "optimizer_state_appears_in_phase": "Adam computes its state from gradients. In which phase of the "
            "training step does Adam first use a gradient?",
        },
    ),
    "0.b": Prediction(
        question="Suppose you double the batch size b. By what factor does the total size of the weights, gradients, "
        "and optimizer state grow? By what factor do the activations grow? Now suppose you double the sequence length "
        "s instead. By what factor does the memory for the attention scores grow?",
        answer={"states": 1, "activations": 2, "scores": 4},
        why="The weights, gradients, and optimizer state depend only on the number of parameters, which doesn't "
        "change. All activations are proportional to b. The scores have shape [b, a, s, s], so they grow with the "
        "square of s.",
        wrong={
            ("states", 2): "Does the model get a second copy of its weights when you feed it twice as much data?",
            "states": "Does the number of weights depend on the batch size?",
            "activations": "The layer saves the same kinds of tensors for every sequence. How many sequences are there "
            "now?",
            ("scores", 2): "The scores have shape [b, a, s, s]. How many times does s appear in that shape?",
            "scores": "The scores have shape [b, a, s, s]. What happens to s · s when you double s?",
        },
    ),
    "0.c": Prediction(
        question="Suppose a validation loop runs total = total + loss for each of 12 batches. At the end of the loop, "
        "how many batches still have their activations in memory? A training loop also calls "
        "loss.backward() on every batch. At the end of a training loop, how many batches still have their activations "
        "in memory?",
        answer={"validation": 12, "training": 0},
        why="The graph of `total` reaches back to every batch. In a validation loop, there's no backward pass that "
        "would free the activations, so memory use climbs with every batch. In a training loop, backward() frees each "
        "batch's activations right away. All that's left is a few small graph objects per batch, so the leak is easy "
        "to miss.",
        wrong={
            ("validation", 1): "`total` depends on all the losses, not just on the last loss.",
            "validation": "When the loop ends, which batches contribute to `total`? Can autograd free any of their "
            "graphs?",
            ("training", 12): "What does backward() do with the activations once it has used them?",
            "training": "What happens to the activations of a batch once backward() is done with them?",
        },
    ),
    "0.d": Prediction(
        question="GPT-3 has 175 billion parameters. How many 80 GB GPUs do you need just to hold the weights, at 2 "
        "bytes each? How many 80 GB GPUs do you need to train the model, at 16 bytes per parameter and ignoring "
        "activations?",
        answer={"gpus_to_answer": 5, "gpus_to_train": 35},
        why="The weights take 350 GB. Four 80 GB GPUs hold only 320 GB, so you need 5 GPUs. Training takes 2,800 GB, "
        "which fills 35 of these GPUs. That's eight times as much memory as the weights take, and the activations come "
        "on top of that.",
        wrong={
            ("gpus_to_answer", 4): "Four GPUs have only 320 GB in total. How many GB do the weights take?",
            (
                "gpus_to_answer",
                35,
            ): "That would be right at 16 bytes per parameter. How many of those bytes does a model need if it's only "
            "used for inference?",
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
        question="A layer of GPT-3 saves 34 + 80 = 114 bytes per element, and the 80 comes from the scores. If you "
        "split the layer over 8 tensor-parallel ranks, how many bytes per element does each rank have to store?",
        answer={"bytes": 23},
        why="The inputs of the two norms, the inputs of Q, K, V, and `up`, and two of the dropout masks are full "
        "tensors on every rank. They take 10 bytes. The remaining 24 bytes and the 80 bytes for the scores are divided "
        "by 8, so each rank stores 10 + 3 + 10 = 23 bytes. You pay for eight GPUs, but each of them still stores a "
        "fifth of the bytes.",
        wrong={
            ("bytes", 14.25): "You divided everything by 8. Which of the saved tensors have shape [b, s, h] on every "
            "rank?",
            (
                "bytes",
                114,
            ): "That's how much the layer stores on a single GPU. For which of the saved tensors does each rank "
            "compute only a slice?",
            (
                "bytes",
                93,
            ): "You didn't divide the scores. Every head has its own scores, and each rank has only some of the heads.",
            (
                "bytes",
                44,
            ): "You divided the 80 bytes of the scores by 8, but you left the 34 bytes of the other tensors "
            "undivided. Which of the other tensors are computed "
            "inside the attention block or the MLP?",
            "bytes": "Go through the table of saved tensors. Each rank stores an eighth of every tensor inside the "
            "attention block or the MLP. Each rank stores the full inputs of the norms, the full inputs of Q, K, V, "
            "and `up`, and the full dropout masks after the attention block and the MLP.",
        },
    ),
    "0.f": Prediction(
        question="Llama 3 405B has 126 layers. With pp = 2, the first stage has 63 layers. With pp = 126, the first "
        "stage has a single layer. By what factor do the first stage's activations shrink?",
        answer={"activations_shrink_by": 1},
        why="With pp = 2, the first stage stores the activations of 63 layers for 2 micro-batches. With pp = 126, it "
        "stores the activations of 1 layer for 126 micro-batches. In both cases, layers times micro-batches is 126, "
        "so the activations don't shrink at all.",
        wrong={
            (
                "activations_shrink_by",
                63,
            ): "The number of layers shrinks by a factor of 63. But how many micro-batches' activations does the "
            "first stage hold at once?",
            (
                "activations_shrink_by",
                126,
            ): "The first stage goes from 63 layers to 1 layer. And how many micro-batches' activations does the "
            "first stage hold at once?",
            "activations_shrink_by": "For each number of stages, multiply the number of layers in the first stage by "
            "the number of micro-batches that the first stage stores at a time.",
        },
    ),
    "0.g": Prediction(
        question="Phase 1 is the forward pass, phase 2 is the backward pass, and phase 3 is the optimizer step. A "
        "device has 10 MB of memory. In which phase does the program run out of memory? Now suppose you train the same "
        "model on two such devices with data parallelism. In which phase does that program run out of memory?",
        answer={"one_device": 3, "two_devices": 3},
        why="The weights, gradients, and activations fit into 10 MB, but Adam's state doesn't. With data parallelism, "
        "each device holds a full replica of the model, so each device still needs the full optimizer state.",
        wrong={
            "one_device": "The weights take up 3.3 MB, and so do the gradients. The activations of a single sequence "
            "are "
            "small. In which phase does Adam allocate its state?",
            "two_devices": "Which of the four kinds of memory does data parallelism divide? The table above shows "
            "what each kind of parallelism divides.",
        },
    ),
}
