"""Prediction questions of chapter 13, with their answers and explanations."""

from tplab.course.checks import Prediction

PREDICTIONS = {
    "13.a": Prediction(
        question="4 stages, 8 micro-batches, all forwards first. A forward of one micro-batch takes 1 unit of time on "
        "a stage, a backward 2. How long does the step take? How long does each rank idle? The bubble, idle over "
        "working?",
        answer={"time": 33, "idle_of_a_rank": 9, "bubble": 0.375},
        why="A rank works 8 · 3 = 24 units. The last rank starts 3 units late, and its gradients need 3 · 2 units to "
        "reach rank 0: 24 + 3 + 6 = 33. The other 9 units are idle, on every rank, and 9/24 = (p-1)/m = 3/8.",
        wrong={
            ("time", 24): "That is how long each rank works. When does the last rank get its first micro-batch, and "
            "when does rank 0 get the last gradient?",
            ("time", 36): "4 + 8 = 12 steps of 3 would be one too many: when does micro-batch 0 reach rank 3?",
            ("time", 96): "That is one rank after the other, with nothing at the same time.",
            "time": "Micro-batch 0 reaches rank 3 after 3 forwards. From then on rank 3 works without a pause. And "
            "after its last backward?",
            "idle_of_a_rank": "The whole time, without the 8 forwards and 8 backwards that the rank works.",
            ("bubble", 0.2727): "That is idle over all of the time. Idle over working is asked for.",
            "bubble": "Idle time of a rank over its working time.",
        },
    ),
    "13.b": Prediction(
        question="1F1B with p = 4 and m = 8: how many micro-batches are live at most on rank 0, and on rank 3? And on "
        "rank 0 with m = 64?",
        answer={"rank_0": 4, "rank_3": 1, "rank_0_with_64": 4},
        why="Rank 3 turns each micro-batch round at once. Rank 0 has to send 4 of them off before the gradient of the "
        "first comes back, and then takes a new one only for one that is done. m does not come into it.",
        wrong={
            ("rank_0", 8): "That is GPipe. When does the gradient of micro-batch 0 come back to rank 0?",
            ("rank_0", 3): "3 of them in the warm-up. Then comes one forward, before the first backward.",
            "rank_0": "How many forwards does rank 0 do before its first backward? Three stages come after it.",
            ("rank_3", 0): "Between its forward and its backward it is live, if only for a moment.",
            "rank_3": "What stands in the list of the last rank: F0 B0 F1 B1, ... How many are live at once?",
            ("rank_0_with_64", 64): "That is GPipe. After the warm-up, a new one comes in only when one is done.",
            "rank_0_with_64": "After the warm-up, each forward is followed by a backward. Does the number grow with m?",
        },
    ),
    "13.c": Prediction(
        question="One step with p = 4 and m = 8: how many messages do all ranks send together, with one stage a rank, "
        "and with v = 2 stages a rank?",
        answer={"one_stage": 48, "two_stages": 112},
        why="Each of m micro-batches crosses every border between two stages twice, once forward and once backward. "
        "With 4 stages there are 3 borders: 2 · 8 · 3 = 48. With 8 stages there are 7: 2 · 8 · 7 = 112.",
        wrong={
            ("one_stage", 24): "That is one direction. What goes back?",
            ("one_stage", 64): "4 stages have 3 borders between them.",
            "one_stage": "How many borders are there between 4 stages? How often does a micro-batch cross each?",
            ("two_stages", 96): "Twice as many stages, but not twice as many borders: 8 stages have 7.",
            ("two_stages", 48): "How many stages are there now, and how many borders between them? A micro-batch goes "
            "round the ranks twice.",
            "two_stages": "Now there are 8 stages, and 7 borders between them. From rank 3 it goes to rank 0.",
        },
    ),
    "13.d": Prediction(
        question="The 1/m is forgotten, m = 8. How many times as large is the first change of the weights, with SGD, "
        "and with Adam?",
        answer={"sgd": 8, "adam": 1},
        why="SGD subtracts the gradient, times the learning rate: 8 times too much. Adam divides by the size of the "
        "gradient, so a factor that is always there cancels. The same mistake, and one optimizer hides it.",
        wrong={
            "sgd": "All gradients are m times too large. What does SGD subtract from a weight?",
            ("adam", 8): "Adam divides the mean of the gradients by the root of the mean of their squares. What does a "
            "factor of 8 do to the one, and to the other?",
            ("adam", 64): "The root is taken of the squares. What remains of the factor?",
            "adam": "Adam's first step is the gradient over its own size. What remains of a factor?",
        },
    ),
}
