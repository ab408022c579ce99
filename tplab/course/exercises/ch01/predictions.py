"""Prediction questions of chapter 01, with their answers. Two of them ask about a report that was just shown."""

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
        why="The sum is [1111, 2222, 3333, 4444], and rank 2 gets chunk 2. In the all-to-all, rank 1 gets chunk 1 from "
        "every rank. In rank order, these chunks are 2, 20, 200, and 2000.",
        wrong={
            ("reduce_scatter_on_rank_2", 2222): "That's chunk 1, because chunks are counted from 0, just like ranks.",
            ("reduce_scatter_on_rank_2", 300): "That's rank 2's own chunk, but a reduce-scatter sums each chunk across "
            "all ranks.",
            "reduce_scatter_on_rank_2": "Write down the sum across all ranks, which has four elements. Which of these "
            "elements goes to rank 2?",
            ("last_of_all_to_all_on_rank_1", 40): "Rank 1 started with that value. Which chunks does rank 1 receive "
            "from the other ranks?",
            ("last_of_all_to_all_on_rank_1", 1000): "That's chunk 0 of rank 3. Which chunk does rank 3 send to rank 1?",
            ("last_of_all_to_all_on_rank_1", 4000): "Rank 3 keeps its chunk 3. Which chunk does rank 3 send to rank 1?",
            "last_of_all_to_all_on_rank_1": "The last value comes from rank 3. Which of rank 3's values 1000, 2000, "
            "3000, and 4000 goes to rank 1?",
        },
    ),
    "1.c": Prediction(
        question="Which collective undoes a `scatter`? Which pair of collectives without a root has the same effect as "
        "an `all_reduce`? Which of the two comes first, and which comes second?",
        answer={"undoes_scatter": "gather", "first": "reduce_scatter", "second": "all_gather"},
        why="A `gather` collects the chunks that a `scatter` handed out. After a `reduce_scatter`, each rank has one "
        "chunk of the sum, and an `all_gather` gives all these chunks to every rank.",
        wrong={
            ("undoes_scatter", "all_gather"): "An `all_gather` gives all the chunks to every rank, but before the "
            "`scatter`, only the root had them.",
            "undoes_scatter": "A `scatter` hands out the root's chunks. Which collective brings these chunks back to "
            "the root?",
            (
                "first",
                "reduce",
            ): "A `reduce` has a root. Which collective sums the tensors and leaves a different chunk "
            "of the sum on each rank?",
            ("first", "all_gather"): "After an `all_gather`, nothing has been summed yet. Which collective sums the "
            "tensors and leaves a different chunk of the sum on each rank?",
            "first": "Which collective sums the tensors and leaves a different chunk of the sum on each rank?",
            ("second", "broadcast"): "A `broadcast` has a root. After the first collective, every rank has one chunk. "
            "Which collective gives all the chunks to every rank?",
            "second": "After the first collective, every rank has one chunk of the sum. Which collective gives all the "
            "chunks to every rank?",
        },
    ),
    "1.d": Prediction(
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
    "1.e": Prediction(
        question="You all-reduce an 8 MiB tensor across 8 ranks. How many MiB does each rank send in a ring "
        "all-reduce? How many MiB does rank 0 send in a tree all-reduce? How many steps does each algorithm take?",
        answer={"ring_mib": 14, "tree_mib": 24, "ring_steps": 14, "tree_steps": 6},
        why=(
            "In the ring, each rank sends 2 · 7 = 14 messages of 1 MiB each. The tree takes three steps up and three "
            "steps down. On the way up, rank 0 only receives. On the way down, rank 0 sends the full 8 MiB to ranks 4, "
            "2, and 1."
        ),
        wrong={
            ("ring_mib", 7): "That's just the reduce-scatter. The all-gather sends another 7 MiB.",
            (
                "ring_mib",
                16,
            ): "That would be 16 messages. But a chunk is finished after 7 steps, and after 7 more steps, every "
            "rank has a copy, so each rank sends only 14 chunks.",
            ("ring_mib", 112): "You counted full tensors, but each message contains only 1/p of the tensor.",
            "ring_mib": "In a ring, each rank sends one message per step. How many steps are there? How many MiB does "
            "each message contain?",
            ("tree_mib", 48): "On the way up the tree, rank 0 only receives, so count only the messages on the way "
            "down.",
            (
                "tree_mib",
                56,
            ): "Rank 0 doesn't have to send the sum to all seven other ranks, because ranks that already have "
            "the sum pass it on.",
            "tree_mib": "On the way down the tree, rank 0 sends one message per step. How many steps are there, and "
            "how large is each message?",
            ("ring_steps", 7): "The chunks go around the ring once to be summed and once more to be copied.",
            "ring_steps": "After how many steps has each chunk visited all eight ranks? How many more steps does it "
            "take to copy the finished chunks to every rank?",
            ("tree_steps", 3): "That's only half of the steps, because the sum also has to travel back down the tree.",
            "tree_steps": "How many steps does it take before rank 0 has the full sum? How many steps does it take to "
            "send the sum back down the tree?",
        },
    ),
    "1.f": Prediction(
        question="With four ranks, how many messages do all ranks together send in a ring all-reduce? How many "
        "messages do they send in a tree all-reduce? If all these messages had to share one link, which algorithm "
        "would be faster at every message size?",
        answer={"messages_in_a_ring": 24, "messages_in_a_tree": 6, "faster": "tree"},
        why="In a ring, each of the four ranks sends 2 · 3 = 6 messages, so the ranks send 24 messages in total. In a "
        "tree, three messages go up and three come down. Both algorithms send 6N bytes in total, so on one shared "
        "link, the ring takes 24α + 6βN seconds, and the tree takes only 6α + 6βN seconds.",
        wrong={
            ("messages_in_a_ring", 6): "That's what each rank sends. How many messages do four ranks send together?",
            ("messages_in_a_ring", 12): "The chunks go around the ring once to be summed and once more to be copied.",
            "messages_in_a_ring": "How many steps does a ring with four ranks take? In each step, how many ranks send "
            "a message?",
            ("messages_in_a_tree", 4): "That's the number of steps, but in some of the steps, more than one rank sends "
            "a message.",
            ("messages_in_a_tree", 3): "Three messages go up the tree. How many messages come back down?",
            "messages_in_a_tree": "On the way up, each rank except rank 0 sends its tensor once. How many messages is "
            "that? How many messages come back down?",
            "faster": "On one shared link, only two totals matter: the number of messages and the number of bytes. "
            "Both algorithms send 6N bytes in total. Which algorithm sends fewer messages?",
        },
    ),
    "1.g": Prediction(
        question="Which rank is missing? Which all-reduce are the other ranks stuck in? In which step did the missing "
        "rank skip its all-reduce? In which step was the missing rank when the other ranks summed their gradients from "
        "step 1?",
        answer={"missing_rank": 2, "number_of_the_all_reduce": 3, "skipped_step": 1, "step_of_missing_rank": 2},
        why="The other ranks call three all-reduces, but rank 2 calls only two, in steps 0 and 2. So rank 2's "
        "gradient from step 2 was summed with the other ranks' gradients from step 1. The other ranks' third call is "
        "waiting for a rank that has already returned.",
        wrong={
            "missing_rank": "The report names the rank that never joined the collective.",
            ("number_of_the_all_reduce", 2): "All-reduce 2 did finish, because rank 2 joined it one step later. Which "
            "number does the report give?",
            "number_of_the_all_reduce": "The report numbers the collectives, starting with `all_reduce #1`. Which "
            "number does the report give?",
            ("skipped_step", 2): "In step 2, rank 2's gradient is finite again. Where does the code put the inf?",
            "skipped_step": "In which step does the code put an inf into rank 2's gradient?",
            ("step_of_missing_rank", 1): "That's the step of the other ranks. List the steps in which rank 2 called an "
            "all-reduce. Which step is second on your list?",
            "step_of_missing_rank": (
                "Write down the steps in which rank 2 actually called an all-reduce. Which step is second on your list?"
            ),
        },
    ),
}
