"""Prediction questions of chapter 01, with their answers. Three are about reports that the learner has just read."""

from tplab.course.checks import Prediction

PREDICTIONS = {
    "1.a": Prediction(
        question="In the notebook, `counter` is 0. Each of 4 ranks adds 1 to `counter` and returns the result. What's "
        "the sum of the four returned numbers? What's the value of `counter` in the notebook afterward?",
        answer={"sum_of_returned": 4, "in_the_notebook": 0},
        why="Each rank changed its own copy of `counter` from 0 to 1, so the four returned numbers add up to 4. The "
        "notebook's variable was never changed.",
        wrong={
            ("sum_of_returned", 10): "The sum would be 1 + 2 + 3 + 4 = 10 if the ranks shared one counter and took "
            "turns. Do the ranks share memory?",
            ("sum_of_returned", 16): (
                "The sum would be 16 if every rank returned 4, but a rank can't see the additions of the other "
                "ranks. Did any rank send a message to another rank?"
            ),
            ("sum_of_returned", 1): "That's what one rank returns. What's the sum over all four ranks?",
            "sum_of_returned": "What's the value of `counter` on one rank, before and after it adds 1? What's the sum "
            "over four ranks?",
            ("in_the_notebook", 4): "Each rank changes only its own copy of `counter`. What would copy the ranks' "
            "values back into the notebook's variable?",
            "in_the_notebook": "The ranks are separate processes, and each rank changes only its own copy of "
            "`counter`. Does anything change the notebook's variable?",
        },
    ),
    "1.b": Prediction(
        question=(
            "Rank r holds [1, 2, 3, 4] multiplied by 10^r. What value does rank 2 get from a reduce-scatter? What's "
            "the last value that rank 1 gets from an all-to-all?"
        ),
        answer={"reduce_scatter_on_rank_2": 3333, "last_of_all_to_all_on_rank_1": 2000},
        why="The sum is [1111, 2222, 3333, 4444], and rank 2 gets the part with index 2. In the all-to-all, rank 1 "
        "gets the part with index 1 from every rank. In rank order, these parts are 2, 20, 200, and 2000.",
        wrong={
            ("reduce_scatter_on_rank_2", 2222): "That's part 1, because parts are counted from 0, just like ranks.",
            ("reduce_scatter_on_rank_2", 300): "That's rank 2's own part, but a reduce-scatter sums each part across "
            "all ranks.",
            "reduce_scatter_on_rank_2": "Write down the sum across all ranks, which has four elements. Which of these "
            "elements goes to rank 2?",
            ("last_of_all_to_all_on_rank_1", 40): "Rank 1 started with that value. Which parts does rank 1 receive "
            "from the other ranks?",
            ("last_of_all_to_all_on_rank_1", 1000): "That's part 0 of rank 3. Which part does rank 3 send to rank 1?",
            ("last_of_all_to_all_on_rank_1", 4000): "Rank 3 keeps its part 3. Which part does rank 3 send to rank 1?",
            "last_of_all_to_all_on_rank_1": "The last value comes from rank 3. Which of rank 3's values 1000, 2000, "
            "3000, and 4000 goes to rank 1?",
        },
    ),
    "1.c": Prediction(
        question="On which line is rank 0 waiting? Which rank is rank 0 waiting for? How many times in total did the "
        "two ranks call `send`?",
        answer={"line_of_rank_0": 6, "rank_that_should_send": 1, "sends_entered": 0},
        why=(
            "Both ranks are stuck in `recv` on line 6. The sends are on line 7, and neither rank ever reaches that "
            "line."
        ),
        wrong={
            ("line_of_rank_0", 7): "Line 7 is the send. Look in the report for the line number after 'rank 0:'.",
            "line_of_rank_0": "The line of the report that starts with 'rank 0:' says where rank 0 is waiting.",
            ("rank_that_should_send", 0): (
                "Rank 0 is the rank that's waiting. Which rank is rank 0 trying to receive from?"
            ),
            "rank_that_should_send": "Rank 0 is waiting in a `recv`. Which rank is rank 0 trying to receive from?",
            "sends_entered": "The program calls `send` after `recv`. Did any rank get past its `recv`?",
        },
    ),
    "1.d": Prediction(
        question="You all-reduce an 8 MiB tensor across 8 ranks. How many MiB does each rank send in a ring "
        "all-reduce? How many MiB does rank 0 send in a tree all-reduce? How many steps does each algorithm take?",
        answer={"ring_mib": 14, "tree_mib": 24, "ring_steps": 14, "tree_steps": 6},
        why=(
            "In the ring, each rank sends 2 · 7 = 14 messages of 1 MiB each. The tree has three levels. On the way "
            "up the tree, rank 0 sends nothing. On the way down, rank 0 sends the full 8 MiB to each of three other "
            "ranks."
        ),
        wrong={
            ("ring_mib", 7): "That's just the reduce-scatter. The all-gather sends another 7 MiB.",
            ("ring_mib", 16): (
                "As the number of ranks grows, the number of bytes approaches 2N. For p = 8, each rank sends only "
                "2(p-1)/p times N bytes."
            ),
            ("ring_mib", 112): "You counted full tensors, but each message contains only 1/p of the tensor.",
            "ring_mib": "Each rank sends 2(p-1) messages, and each message contains 1/p of the 8 MiB.",
            ("tree_mib", 48): "On the way up the tree, rank 0 only receives, so count only the messages on the way "
            "down.",
            ("tree_mib", 56): "Rank 0 doesn't send the sum to all seven other ranks, because ranks that already have "
            "the sum pass it on.",
            "tree_mib": "On the way down the tree, rank 0 sends one message per step. How many steps are there, and "
            "how large is each message?",
            ("ring_steps", 7): "The parts go around the ring once to be summed and once more to be copied.",
            "ring_steps": "The reduce-scatter takes p - 1 steps, and so does the all-gather.",
            ("tree_steps", 3): "That's only half of the steps, because the sum also has to travel back down the tree.",
            "tree_steps": "How many times can you halve 8 ranks before only one is left? The all-reduce takes that "
            "many steps up the tree and the same number of steps down.",
        },
    ),
    "1.e": Prediction(
        question="Which rank is the odd one out? Which all-reduce are the other ranks stuck in? In which step did the "
        "mismatched rank skip its all-reduce? When the other ranks summed their gradients from step 1, which step did "
        "the mismatched rank's gradient come from?",
        answer={"odd_rank": 2, "number_of_the_all_reduce": 3, "skipped_step": 1, "paired_with_its_step": 2},
        why="The other ranks call three all-reduces, but rank 2 calls only two, in steps 0 and 2. So rank 2's "
        "gradient from step 2 was summed with the other ranks' gradients from step 1. The other ranks' third call is "
        "waiting for a rank that has already returned.",
        wrong={
            "odd_rank": "The report names the rank that never joined the collective.",
            ("number_of_the_all_reduce", 2): "All-reduce 2 did finish, because rank 2 joined it one step later. Which "
            "number does the report give?",
            "number_of_the_all_reduce": "The report numbers the collectives from 1, as in `all_reduce #1`.",
            ("skipped_step", 2): "In step 2, rank 2's gradient is finite again. Where does the code put the inf?",
            "skipped_step": "In which step does the code put an inf into rank 2's gradient?",
            ("paired_with_its_step", 1): "In step 1, rank 2 didn't call an all-reduce. In which step did rank 2 call "
            "its next all-reduce?",
            "paired_with_its_step": (
                "Write down the steps in which rank 2 actually called an all-reduce. Which step is the second one on "
                "your list?"
            ),
        },
    ),
    "1.f": Prediction(
        question=(
            "Which collective got tensors of different shapes? Which rank is the odd one out? How many elements did "
            "that rank pass to the collective?"
        ),
        answer={"number_of_the_collective": 2, "rank": 3, "elements": 1},
        why="Collective 1 all-reduced the count, which has the same shape on every rank. Collective 2 was the "
        "all-gather. Rank 3 passed one element to the all-gather, and each of the other ranks passed three elements, "
        "because ten examples can't be divided evenly by four.",
        wrong={
            ("number_of_the_collective", 1): "Collective 1 all-reduced the count, which is a single number on every "
            "rank.",
            "number_of_the_collective": "The report gives each collective a number, as in `all_reduce #1`.",
            "rank": "Compare the shapes in the four lines of the report. Which rank passed a different shape?",
            ("elements", 2): "Split 10 examples into chunks of 3. How many examples are left after three chunks?",
            ("elements", 3): "Each of the other ranks passed 3 elements. How many elements did the mismatched rank "
            "pass?",
            "elements": "The report shows the shape that each rank passed. Look at the mismatched rank's line.",
        },
    ),
}
