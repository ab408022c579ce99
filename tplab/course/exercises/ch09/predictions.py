"""Prediction questions of chapter 09, with their answers and explanations."""

from tplab.course.checks import Prediction

_PLACE = "Is this tensor whole and the same on every rank, or has each rank its own part of it?"

PREDICTIONS = {
    "9.a": Prediction(
        question="A weight [4096, 1024] has Xavier's standard deviation 0.0198. Four ranks call xavier_normal_ on "
        "their shards [1024, 1024], all from one seed. Which standard deviation do they get, and are the shards all "
        "equal?",
        answer={"std": 0.03125, "all_equal": True},
        why="sqrt(2 / (1024 + 1024)) = 0.03125: the function sees 1024 rows where the weight has 4096. And one seed "
        "gives every rank the same numbers.",
        wrong={
            "std": "sqrt(2 / (in + out)): which two sizes does the function see?",
            ("std", 0.0198): "That is the one of the whole weight. Who tells the function about it?",
            ("std", 0.0255): "That is the one for two ranks.",
            "all_equal": "What does a generator draw that starts from the same seed, in another process?",
        },
    ),
    "9.b": Prediction(
        question="Inside the MLP there are m = 4096 places for each token, on four ranks 1024 each. All ranks draw "
        "from the same state. How many of the 4096 places are dropped or kept independently of the others? And what "
        "is the correlation of the masks of ranks 0 and 1?",
        answer={"independent": 1024, "correlation": 1},
        why="Rank 1 drops in its columns just where rank 0 drops in its own: 1024 draws decide about 4096 places, and "
        "the two masks are one.",
        wrong={
            "independent": "How many random numbers does one rank draw for a token? What do the other ranks add to "
            "them?",
            ("independent", 4096): "That is how it should be. How many different random numbers are drawn here?",
            "correlation": "If rank 0 drops its 17th column, what does rank 1 do with its own 17th?",
            ("correlation", 0): "That would be so with a state for each rank.",
        },
    ),
    "9.c": Prediction(
        question='In which places do the ranks have to drop alike ("replicated"), and in which each on its own '
        '("sharded")? The four places: the output of the embedding [b, s, h] that every rank holds whole; the '
        "attention "
        "probabilities [b, a/p, s, s]; the tensor inside the MLP [b, s, m/p]; the output of the MLP, after g, [b, "
        "s, h].",
        answer={
            "embedding_output": "replicated",
            "attention_probabilities": "sharded",
            "inside_mlp": "sharded",
            "mlp_output": "replicated",
        },
        why="Where a rank has heads or columns of its own, its places are other places than those of the next rank. "
        "Where every rank holds the same tensor, it has to stay the same.",
        wrong={
            "embedding_output": _PLACE,
            "attention_probabilities": f"{_PLACE} What does the a/p in its shape say?",
            "inside_mlp": f"{_PLACE} What does the m/p in its shape say?",
            "mlp_output": f"{_PLACE} What has g done?",
        },
    ),
    "9.d": Prediction(
        question="Your block from exercise 9.4 on two ranks: it has g forward and f backward. Now it is "
        "checkpointed. How many all-reduces run in its forward pass, and how many in its backward pass?",
        answer={"forward": 1, "backward": 2},
        why="Forward as before: g. In backward the function runs a second time, g included, and then f sums the "
        "gradient of the input.",
        wrong={
            "forward": "The first run is the same program as without checkpointing. What does it send?",
            "backward": "What runs in backward before the gradients can be computed? What does that send?",
            ("backward", 1): "That is f. And what does the second run of the block send?",
        },
    ),
}
