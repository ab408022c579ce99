"""Prediction questions of chapter 10, with their answers and explanations."""

from tplab.course.checks import Prediction

PREDICTIONS = {
    "10.a": Prediction(
        question="One layer on four ranks, b = 2, s = 16, h = 32, float32: how many all-reduces forward and "
        "backward, of how many bytes each, and how many more for the gradients of norms and last biases?",
        answer={"forward": 2, "backward": 2, "bytes_each": 4096, "for_norms_and_biases": 0},
        why="Each block has one g (forward) and one f (backward), on tensors of 2 · 16 · 32 numbers of 4 bytes. "
        "Between g and the next f everything is replicated: the same numbers in, the same gradients back, on every "
        "rank.",
        wrong={
            "forward": "Two blocks, each ends with one g. Does a norm or a residual send anything?",
            "backward": "Two blocks, each begins with one f. In which direction does f communicate?",
            ("forward", 4): "That is both directions together.",
            ("backward", 4): "That is both directions together.",
            "bytes_each": "g and f work on [b, s, h], whatever p is. How many bytes has a float32?",
            ("bytes_each", 1024): "That is how many numbers there are. How many bytes has each?",
            ("bytes_each", 16384): "That is what all four hold together, or p of them. One message?",
            "for_norms_and_biases": "Which gradient reaches the norm's output: a part of it, or the whole, on every "
            "rank?",
        },
    ),
    "10.b": Prediction(
        question="A layer with h = 64 and an MLP of 4h: how many parameters are whole on every rank, and how "
        "many numbers of the cut ones does each of 4 ranks hold?",
        answer={"replicated": 384, "of_the_cut_ones": 12400},
        why="Whole: two norms with 2h each and two biases of h behind g, 6h = 384. Cut: 12h² of weights, 3h of "
        "Q, K, V's bias and 4h of the first MLP layer's, 12 · 4096 + 7 · 64 = 49600, of which each rank has a quarter.",
        wrong={
            "replicated": "Two norms, each with a weight and a bias of h. And which of the four linear layers add "
            "their bias after the sum?",
            ("replicated", 256): "Those are the norms. Which biases are whole too?",
            ("replicated", 512): "Which of the norms' parameters and of the biases did you count twice?",
            "of_the_cut_ones": "The weights are 3h², h², 4h² and 4h². Two of the four biases are cut with their rows: "
            "3h and 4h. Divide by p at the end.",
            ("of_the_cut_ones", 49600): "That is all of them. Each of four ranks has a part.",
            ("of_the_cut_ones", 12288): "Those are the weights. Two biases are cut with them.",
        },
    ),
    "10.c": Prediction(
        question="A GPT with L = 2: how many all-reduces has one training step, if the loss has 2? How many of "
        "them have b·s·h numbers?",
        answer={"all_reduces": 12, "of_bsh": 10},
        why="Four for each layer, one g behind the embedding, one f in front of the logits: 4 · 2 + 2 = 10 of "
        "b·s·h. The loss sends its maxima and its sums, two small ones.",
        wrong={
            "of_bsh": "Four for each of two layers. What do the two ends of the model send: the embedding forward, "
            "the logits backward?",
            ("of_bsh", 8): "Those are the layers. What do the two ends of the model send?",
            (
                "of_bsh",
                12,
            ): "Has the embedding an f, or the output layer a g? One of the directions is missing in each.",
            "all_reduces": "Those of b·s·h, and the two of the loss.",
        },
    ),
    "10.d": Prediction(
        question="Rank 0 has the logits [0.5, 2.0, -1.0, 2.0], rank 1 [1.0, 0.0, 3.0, 3.0]: which place does "
        "argmax give on each rank, and which id is chosen? How many numbers has a gather of GPT-2's logits for one "
        "token, on two ranks?",
        answer={"place_on_rank_0": 1, "place_on_rank_1": 2, "chosen_id": 6, "gathered": 50432},
        why="argmax gives the first of equal ones. Rank 1's best is larger; place 2 of its four ids 4, 5, 6, 7 "
        "is id 6. A gather would bring together all 50432 columns, the padding too, to use one of them.",
        wrong={
            "place_on_rank_0": "argmax gives the first place of the largest number, counted from 0.",
            "place_on_rank_1": "argmax gives the first place of the largest number, counted from 0, in this rank's "
            "own shard.",
            ("place_on_rank_1", 6): "That is its id. Which place in the shard of rank 1 is it?",
            "chosen_id": "Which rank has the largest logit? Its ids begin at 4, and of equal ones the lower id counts.",
            ("chosen_id", 2): "That is the place in the shard of rank 1. Which id stands there?",
            ("chosen_id", 7): "Two ids have this logit. Which of them is the lower?",
            "gathered": "A gather brings together the shards of both ranks, with their padding.",
            ("gathered", 50257): "The shards hold the padding too.",
            ("gathered", 25216): "That is one shard. An all-gather counts all parts together.",
        },
    ),
}
