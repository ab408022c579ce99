"""Prediction questions of chapter 06, with their answers and explanations."""

from tplab.course.checks import Prediction

PREDICTIONS = {
    "6.a": Prediction(
        question="h = 32 and 8 heads on p = 4 ranks, x is [2, 5, 32]. Which shape has the fused weight on a rank, and "
        "q, split into heads? How many all-reduces, forward and backward together, and of how many bytes is each "
        "(float32)?",
        answer={"qkv_weight": (24, 32), "q": (2, 2, 5, 4), "all_reduces": 2, "bytes_each": 1280},
        why="A rank has 2 of 8 heads, each with d = 4: 8 rows of each of the three matrices. One g forward and one f "
        "backward, each of b·s·h = 320 numbers.",
        wrong={
            "qkv_weight": "nn.Linear stores [out, in]. The whole is [3h, h]; which of the two is cut, and by what?",
            ("qkv_weight", (32, 24)): "nn.Linear stores [out, in].",
            ("qkv_weight", (8, 32)): "That is one of the three matrices.",
            "q": "[b, heads on this rank, s, d]. How many heads has a rank, and how wide is a head?",
            ("q", (2, 8, 5, 1)): "That cuts every head inside. A rank has whole heads.",
            "all_reduces": "It is built like the MLP: one column-parallel layer, one row-parallel layer.",
            "bytes_each": "f and g both work on a tensor of the shape of x. How many numbers, how many bytes each?",
            ("bytes_each", 320): "That is how many numbers. A float32 has four bytes.",
        },
    ),
    "6.b": Prediction(
        question="4 heads with d = 2: [Wq; Wk; Wv] has 24 rows. p = 2. Which rows does rank 1 need? And if the whole "
        "were cut in the middle, which rows would rank 0 take for its keys?",
        answer={
            "rows_of_rank_1": [4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23],
            "keys_of_rank_0_after_the_middle_cut": [4, 5, 6, 7],
        },
        why="Heads 2 and 3 are rows 4 to 7 of each matrix, and the matrices begin at rows 0, 8 and 16. Cut in the "
        "middle, rank 0 holds rows 0 to 11 and takes their middle third for keys: the queries of heads 2 and 3.",
        wrong={
            "rows_of_rank_1": "Heads 2 and 3, of Q, of K and of V. In which rows do Wk and Wv begin?",
            ("rows_of_rank_1", tuple(range(12, 24))): "That is the cut in the middle: half of the keys and all values.",
            "keys_of_rank_0_after_the_middle_cut": "Rank 0 has rows 0 to 11 then, and cuts what it gets into three "
            "equal parts. Which rows make the second part, and whose rows are they?",
            ("keys_of_rank_0_after_the_middle_cut", (8, 9, 10, 11)): "Those are keys. But the rank's second third is "
            "what it takes for keys.",
        },
    ),
    "6.c": Prediction(
        question="Two ranks hold copies of the only head of K and V, and nobody adds up the copies' gradients. Which "
        "of out, dWq, dWk and dx are right after the first backward pass?",
        answer={"out": True, "dWq": True, "dWk": False, "dx": True},
        why="Each copy gets the part of its own rank's queries: dWk and dWv are summands. Everything else is right: "
        "each rank has its own queries, and f adds up dx over both ranks, the parts through both copies included.",
        wrong={
            "out": "Nothing is summed over copies in the forward pass. Are the copies equal before the first update?",
            "dWq": "Who else has this rank's queries?",
            "dWk": "A query that lives on the other rank looks at the same head of K. Where does its part of the "
            "gradient arrive?",
            "dx": "x feeds the queries and both copies. Which operator adds up the parts of dx, and over which ranks?",
        },
    ),
    "6.d": Prediction(
        question="Llama 3 70B: 80 layers, 64 heads, 8 of K and V, d = 128. One text of 8192 tokens, two bytes a "
        "number. How many GiB (2**30 bytes) of keys and values has each rank, with p = 1, 8 and 16?",
        answer={"p1": 2.5, "p8": 0.3125, "p16": 0.3125},
        why="2 · 80 · 8 · 8192 · 128 · 2 bytes are 2.5 GiB. With p = 8 each rank has one head of K and V, an eighth; "
        "with p = 16 still one, as a copy.",
        wrong={
            "p1": "Keys and values, for each layer: b · heads of K and V · tokens · d numbers.",
            ("p1", 1.25): "Keys *and* values.",
            ("p1", 20): "That is with 64 heads. How many of K and V are there?",
            "p8": "How many of the 8 heads of K and V has each of 8 ranks?",
            "p16": "Can a rank have half a head?",
            ("p16", 0.15625): "A head is never cut inside: with more ranks than heads of K and V, how many has each?",
        },
    ),
}
