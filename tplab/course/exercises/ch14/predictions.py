"""Prediction questions of chapter 14, with their answers and explanations."""

from tplab.course.checks import Prediction

PREDICTIONS = {
    "14.a": Prediction(
        question="Rank 0 has 30 tokens with a mean loss of 2, rank 1 has 10 with a mean loss of 4. The mean over all "
        "tokens? And the mean of the two means?",
        answer={"mean_over_tokens": 2.5, "mean_of_means": 3},
        why="(30 · 2 + 10 · 4) / 40 = 2.5. The mean of the means is 3: in it a token of rank 1 counts three times as "
        "much as one of rank 0. What holds for the loss holds for its gradient.",
        wrong={
            "mean_over_tokens": "Add up the losses of all tokens, then divide by the number of all tokens.",
            (
                "mean_over_tokens",
                3,
            ): "That is the mean of the means. How many tokens has a loss of 2, and how many a loss of 4?",
            "mean_of_means": "Two numbers, 2 and 4. What lies in the middle?",
            ("mean_of_means", 2.5): "That counts tokens. Here each rank counts once.",
        },
    ),
    "14.b": Prediction(
        question="Adam in mixed precision, 16 bytes a parameter: 2 weight, 2 gradient, 12 optimizer state. With dp = "
        "4, how many bytes a parameter does a rank hold in ZeRO-1, ZeRO-2 and ZeRO-3?",
        answer={"zero_1": 7, "zero_2": 5.5, "zero_3": 4},
        why="ZeRO-1: 2 + 2 + 12/4 = 7. ZeRO-2: 2 + (2 + 12)/4 = 5.5. ZeRO-3: 16/4 = 4.",
        wrong={
            "zero_1": "The optimizer's 12 bytes are shared out over 4 ranks, the weight and the gradient stay whole.",
            ("zero_1", 3): "That is its part of the optimizer state. Weights and gradients are there too.",
            ("zero_1", 4): "That is everything divided by 4. Only the optimizer state is shared out here.",
            "zero_2": "Now the gradient's 2 bytes are shared out as well. What is still whole?",
            "zero_3": "Everything is shared out: 16 bytes over 4 ranks.",
        },
    ),
    "14.c": Prediction(
        question="A mesh of dp = 2, pp = 2, tp = 2, with tp innermost and dp outermost. Where is rank 5, and which "
        "rank has the same parameters as rank 5?",
        answer={"dp": 1, "pp": 0, "tp": 1, "same_parameters_as_5": 1},
        why="5 = 1 · 4 + 0 · 2 + 1: replica 1, stage 0, shard 1. Rank 1 has the same stage and the same shard, in "
        "replica 0.",
        wrong={
            "dp": "A replica has pp · tp = 4 ranks. In which replica is rank 5, counted from 0?",
            "pp": "Within its replica, ranks 4 to 7, each stage has tp = 2 ranks. In which stage is rank 5?",
            "tp": "Its stage has ranks 4 and 5. Which of the two is it, counted from 0?",
            "same_parameters_as_5": "Same stage, same shard, another replica. By how much does the rank change from "
            "one replica to the next?",
            ("same_parameters_as_5", 4): "Rank 4 has the other half of every matrix: it is in the same tp group.",
            ("same_parameters_as_5", 7): "Rank 7 has the same shard of other layers: it is in the same pp group.",
        },
    ),
    "14.d": Prediction(
        question="Four tensor-parallel ranks. The gradients of the shards have squares that add up to 12 on each rank, "
        "those of the replicated parameters to 4 on each rank. The norm of the whole gradient, squared? And what "
        "comes out, squared, if every rank adds up what it has?",
        answer={"right": 52, "everything_added": 64},
        why="4 · 12 + 4 = 52: four different shards, and one replicated gradient that all four hold. Added up "
        "everywhere: 4 · (12 + 4) = 64.",
        wrong={
            "right": "The shards of four ranks are different numbers, the replicated ones are the same. How often does "
            "each of them belong to the model?",
            ("right", 64): "The replicated gradient is one gradient, held four times.",
            ("right", 16): "That is one rank. The other three have other shards.",
            "everything_added": "Four ranks, and each adds 12 and 4.",
        },
    ),
}
