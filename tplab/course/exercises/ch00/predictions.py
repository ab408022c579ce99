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
            "activations": "The layer saves the same set of tensors for each sequence. How many sequences are "
            "there now?",
            ("scores", 2): "The scores have shape [b, a, s, s]. How many of these four dimensions grow when you "
            "double s?",
            "scores": "The scores have shape [b, a, s, s]. What happens to s² when you double s?",
        },
    ),
    "0.c": Prediction(
        question="Suppose a validation loop runs total = total + loss on each of 12 batches. At the end of the "
        "loop, how many batches still have their activations in memory? Now suppose a training loop runs "
        "the same line and also calls loss.backward() on every batch. At the end of a training loop, how "
        "many batches still have their activations in memory?",
        answer={"validation": 12, "training": 0},
        why="The autograd graph of `total` contains the graphs of all the batches. In a validation loop, there's "
        "no backward pass that would free the activations, so memory use climbs with every batch. In a "
        "training loop, backward() frees each batch's activations right away. Only a few small nodes of "
        "the autograd graph remain in memory per batch, so the leak is easy to miss.",
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
            ): "That would be correct for 16 bytes per parameter. How many of these 16 bytes do you need if you "
            "use the model only for inference?",
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
        question="A layer of GPT-3 saves 34 + 80 = 114 bytes for each element of its input, and 80 of these bytes "
        "are for the attention scores. If you split the layer across 8 tensor-parallel ranks, how many "
        "bytes per input element does each rank have to store?",
        answer={"bytes": 23},
        why="Every rank stores the full inputs of the two norms, the full inputs of Q, K, V, and `up`, and two "
        "full dropout masks. These full tensors take 10 bytes per element. The other 24 of the 34 bytes "
        "shrink to 24/8 = 3 bytes, and the 80 bytes for the scores shrink to 80/8 = 10 bytes. So each rank "
        "stores 10 + 3 + 10 = 23 bytes per element. You pay for eight GPUs, but each GPU still stores "
        "about a fifth of the original 114 bytes.",
        wrong={
            ("bytes", 14.25): "You divided everything by 8. Which of the saved tensors have the full shape [b, s, "
            "h] on every rank?",
            (
                "bytes",
                114,
            ): "That's how much the layer stores on a single GPU. Each rank computes only a slice of some of the "
            "saved tensors. Which tensors are these?",
            (
                "bytes",
                93,
            ): "You didn't divide the scores. Every head has its own scores, and each rank has only some of the heads.",
            (
                "bytes",
                44,
            ): "You divided the 80 bytes for the scores by 8, but you didn't divide the 34 bytes for the other "
            "tensors. Which of these 34 bytes come from tensors that are computed inside the attention "
            "block or the MLP?",
            "bytes": "Go through the table of saved tensors. Each rank stores an eighth of every tensor inside the "
            "attention block or the MLP. The norm inputs, the inputs of Q, K, V, and `up`, and the dropout "
            "masks after the attention block and the MLP are stored in full on every rank.",
        },
    ),
    "0.f": Prediction(
        question="Llama 3 405B has 126 layers. With 2 pipeline stages (pp = 2), the first stage has 63 layers. "
        "With 126 pipeline stages (pp = 126), the first stage has a single layer. By what factor do the "
        "first stage's activations shrink?",
        answer={"activations_shrink_by": 1},
        why="With 2 pipeline stages, the first stage stores the activations of 63 layers for 2 micro-batches. With "
        "126 pipeline stages, the first stage stores the activations of one layer for 126 micro-batches. "
        "In both cases, the number of layers times the number of micro-batches is 126, so the activations "
        "don't shrink at all.",
        wrong={
            (
                "activations_shrink_by",
                63,
            ): "The number of layers shrinks by a factor of 63. But for how many micro-batches does the first "
            "stage have to hold activations at the same time?",
            (
                "activations_shrink_by",
                126,
            ): "With 126 pipeline stages instead of 2, the first stage has one layer instead of 63. But for how "
            "many micro-batches does the first stage have to hold activations at the same time?",
            "activations_shrink_by": "For each number of stages, multiply the number of layers in the first stage by "
            "the number of micro-batches that the first stage stores at a time.",
        },
    ),
    "0.g": Prediction(
        question="Phase 1 is the forward pass, phase 2 is the backward pass, and phase 3 is the optimizer step. A "
        "device has 10 MB of memory. In which phase does the program run out of memory? Now suppose you "
        "train the same model on two devices with 10 MB each, using data parallelism. In which phase does "
        "the data-parallel program run out of memory?",
        answer={"one_device": 3, "two_devices": 3},
        why="The weights, gradients, and activations fit into 10 MB, but Adam's state doesn't. With data parallelism, "
        "each device holds a full replica of the model, so each device still needs the full optimizer state.",
        wrong={
            "one_device": "The weights take up 3.3 MB, and so do the gradients. The activations for a single "
            "sequence are small. In which phase does Adam allocate m and v?",
            "two_devices": "Which of the four kinds of memory does data parallelism divide? The table above shows "
            "what each kind of parallelism divides.",
        },
    ),
}
