"""Prediction questions of chapter 11, with their answers and explanations."""

from tplab.course.checks import Prediction

PREDICTIONS = {
    "11.a": Prediction(
        question="An all-reduce of 50,331,648 bytes over 8 ranks in a ring, each step 3.4 µs and 300 GB/s. How many "
        "steps follow one another, and how many microseconds do they take together?",
        answer={"steps": 14, "microseconds": 341.2},
        why="7 steps to add the parts up and 7 to spread the sums. In each an eighth of the tensor goes over every "
        "link: 3.4 µs + 6,291,456 bytes / 300 GB/s = 24.4 µs. 14 of them are 341 µs.",
        wrong={
            "steps": "p - 1 steps until every part of the sum is complete on some rank. How many more until it is on "
            "all of them?",
            ("steps", 7): "That is the reduce-scatter. What comes after it?",
            ("steps", 16): "A part needs p - 1 steps to visit p ranks, not p.",
            "microseconds": "In each step an eighth of the tensor goes over a link. 3.4 µs, plus its bytes divided by "
            "300,000 bytes a microsecond; times the number of steps.",
            ("microseconds", 170.6): "That is one way round the ring.",
            ("microseconds", 2396.4): "In each step goes an eighth of the tensor, not all of it.",
            ("microseconds", 293.6): "Every step is a message of its own and pays the 3.4 µs again.",
            ("microseconds", 297.0): "Every step is a message of its own and pays the 3.4 µs again.",
        },
    ),
    "11.b": Prediction(
        question="What happens to the operations of the weights' products, and to the bytes of the all-reduces, when h "
        "is doubled? And when b is doubled? Give factors.",
        answer={"operations_with_h": 4, "bytes_with_h": 2, "operations_with_b": 2, "bytes_with_b": 2},
        why="24·b·s·h² operations against messages of b·s·h numbers. Their ratio grows with h and does not know b: a "
        "larger layer is easier to spread over ranks, a larger batch is not.",
        wrong={
            "operations_with_h": "Each weight matrix is h by h, or h by 4h. What happens to it when h doubles?",
            "bytes_with_h": "The tensors that f and g sum are [b, s, h].",
            "operations_with_b": "Twice as many tokens go through the same weights.",
            "bytes_with_b": "The tensors that f and g sum are [b, s, h].",
        },
    ),
    "11.c": Prediction(
        question="dX takes 5 ms, dA 5 ms, the all-reduce of dX 3 ms. How long is the backward pass with a blocking "
        "all-reduce, and how long if dA is computed while the sum travels? And if the all-reduce takes 8 ms: how long "
        "is it then, and which share of the communication is hidden?",
        answer={"blocking": 13, "beside": 10, "beside_with_8": 13, "share_with_8": 0.625},
        why="Blocking: 5 + 5 + 3. Beside: 5 + max(5, 3). With 8 ms: 5 + max(5, 8), and 5 of the 8 ms lie beside dA.",
        wrong={
            "blocking": "One after the other: dX, dA, all-reduce.",
            "beside": "The all-reduce can start when dX is there, not earlier. Then it and dA run at the same time.",
            ("beside", 5): "dX has to be there before its sum can travel. What comes first?",
            ("beside", 8): "dX, then two things at the same time: 5 + max(5, 3).",
            "beside_with_8": "dX first. Then dA and the all-reduce run at the same time, and the longer one decides.",
            ("beside_with_8", 10): "After dA is done the rank still has to wait for the sum.",
            "share_with_8": "For how many of the 8 ms does the rank compute something?",
            ("share_with_8", 0.375): "That is the share that is exposed.",
            ("share_with_8", 1.0): "dA is over after 5 ms. What does the rank do in the other 3?",
        },
    ),
    "11.d": Prediction(
        question="The all-reduce of dx is started, and nobody waits for it. Is an error raised? Is dW right? Can "
        "you rely on dx when it is read at once (dx_right)?",
        answer={"error": False, "dw_right": True, "dx_right": False},
        why="Starting is all that `async_op=True` does. dW needs no sum. Until the last message "
        "has come, dx is this rank's own part, or something halfway to the sum.",
        wrong={
            "error": "Does torch know which tensor you are about to read?",
            "dw_right": "Which tensors does dW need, and does the all-reduce write into one of them?",
            "dx_right": "What is in the tensor before the last message has come?",
        },
    ),
}
