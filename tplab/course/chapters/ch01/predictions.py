"""Prediction questions of chapter 01, with their answers. Three are about reports that the learner has just read."""

from tplab.course.checks import Prediction

PREDICTIONS = {
    "1.a": Prediction(
        question="In the notebook, counter is 0. Each of 4 ranks adds 1 to it and returns it. What do the returned "
        "numbers "
        "add up to, and what's counter in the notebook afterward?",
        answer={"sum_of_returned": 4, "in_the_notebook": 0},
        why="Each rank changes its own copy from 0 to 1, and four times 1 is 4. The notebook's variable was "
        "never changed.",
        wrong={
            (
                "sum_of_returned",
                10,
            ): "1 + 2 + 3 + 4 would be right if the ranks shared one counter. Do they share memory?",
            (
                "sum_of_returned",
                16,
            ): "The ranks would only get 4 if they counted together. Did any of them send a message?",
            ("sum_of_returned", 1): "That's what one rank returns. What about all four together?",
            "sum_of_returned": "What's counter on one rank, before and after it adds 1? And what's the sum over four "
            "ranks?",
            (
                "in_the_notebook",
                4,
            ): "The ranks work on copies. Who would write their numbers into the notebook's variable?",
            "in_the_notebook": "The ranks are different processes and work on copies. Who writes into the notebook's "
            "variable?",
        },
    ),
    "1.b": Prediction(
        question="Rank r holds 1, 2, 3, 4 times 10^r. What does rank 2 get from a reduce-scatter, and what's the last "
        "number that rank 1 gets from an all-to-all?",
        answer={"reduce_scatter_on_rank_2": 3333, "last_of_all_to_all_on_rank_1": 2000},
        why="The sum is 1111, 2222, 3333, 4444, and rank 2 gets the part with index 2. In the all-to-all, rank 1 gets "
        "the part with index 1 from every rank, which is 2, 20, 200, 2000, in rank order.",
        wrong={
            ("reduce_scatter_on_rank_2", 2222): "Parts are counted from 0, just like ranks.",
            (
                "reduce_scatter_on_rank_2",
                300,
            ): "That's rank 2's own part. But the parts are added up over all ranks first.",
            "reduce_scatter_on_rank_2": "Write down the sum over the ranks, which is four numbers. Which of them "
            "goes to rank 2?",
            (
                "last_of_all_to_all_on_rank_1",
                40,
            ): "That's what rank 1 started with. Which parts does it get, and from whom?",
            ("last_of_all_to_all_on_rank_1", 1000): "Parts are counted from 0, just like ranks.",
            (
                "last_of_all_to_all_on_rank_1",
                4000,
            ): "Rank 3 keeps its part 3. Which part does it send to rank 1?",
            "last_of_all_to_all_on_rank_1": "The last number comes from rank 3. Which of 1000, 2000, 3000 and "
            "4000 goes to rank 1?",
        },
    ),
    "1.c": Prediction(
        question="On which line is rank 0 waiting, which rank is it waiting for, and how many calls of send did "
        "the ranks reach in total?",
        answer={"line_of_rank_0": 6, "rank_that_should_send": 1, "sends_entered": 0},
        why="Both ranks are stuck in recv on line 6. The sends are on line 7, and neither rank ever gets there.",
        wrong={
            ("line_of_rank_0", 7): "Line 7 is the send. Look for the line number in the report, after 'rank 0:'.",
            "line_of_rank_0": "Look at the line of the report that starts with 'rank 0:'. It says where rank 0 waits.",
            ("rank_that_should_send", 0): "Rank 0 is the rank that's waiting. Which rank does it want to receive from?",
            "rank_that_should_send": "Rank 0 is waiting in a recv. Which rank does it want to receive from?",
            "sends_entered": "The send comes after the recv. Did any rank get past its recv?",
        },
    ),
    "1.d": Prediction(
        question="For 8 MiB and p = 8, how many MiB does each rank of a ring send, how many does rank 0 of a tree "
        "send, and how "
        "many steps does each of them take?",
        answer={"ring_mib": 14, "tree_mib": 24, "ring_steps": 14, "tree_steps": 6},
        why="In the ring, each rank sends 2 · 7 messages of 1 MiB. The tree has three levels, and on the way down "
        "rank 0 "
        "sends the full 8 MiB to three others. On the way up, it sends nothing.",
        wrong={
            ("ring_mib", 7): "That's just the reduce-scatter. The all-gather sends as much again.",
            ("ring_mib", 16): "2N is the limit for very many ranks. With p = 8, it's 2(p-1)/p of N.",
            ("ring_mib", 112): "Each message contains only 1/p of the tensor.",
            "ring_mib": "Each rank sends 2(p-1) messages, and each of them contains 1/p of the 8 MiB.",
            ("tree_mib", 48): "On the way up, rank 0 only receives.",
            ("tree_mib", 56): "Rank 0 doesn't send to all seven others, because those that have the tensor pass it on.",
            "tree_mib": "On the way down, rank 0 sends once per step. How many steps are there, and how large is a "
            "message?",
            ("ring_steps", 7): "The parts go around the ring once to be added up and once more to be handed out.",
            "ring_steps": "The reduce-scatter takes p - 1 steps, and so does the all-gather.",
            ("tree_steps", 3): "The sum also has to travel back down the tree.",
            "tree_steps": "How often can you halve 8 ranks? You need that many steps up and as many down.",
        },
    ),
    "1.e": Prediction(
        question="Which rank is the odd one out, which all-reduce are the others stuck in, in which step did "
        "that rank skip its all-reduce, and which of its own steps was paired with the others' step 1?",
        answer={"odd_rank": 2, "number_of_the_all_reduce": 3, "skipped_step": 1, "paired_with_its_step": 2},
        why="The others enter three all-reduces, but rank 2 only enters two, in steps 0 and 2. Its second one, from "
        "step "
        "2, was paired with the others' second one, from step 1. Their third one waits for a rank that has already "
        "returned.",
        wrong={
            "odd_rank": "The first sentence of the report names a rank that never joined.",
            (
                "number_of_the_all_reduce",
                2,
            ): "Rank 2 skipped the one in step 1, but its next call took that one's place. "
            "Which number does the report give?",
            "number_of_the_all_reduce": "The report gives it after a #, counted from 1.",
            ("skipped_step", 2): "In step 2, rank 2's gradient is finite again. Where does the code put the inf?",
            "skipped_step": "In which step does the code put an inf into rank 2's gradient?",
            (
                "paired_with_its_step",
                1,
            ): "In step 1, rank 2 didn't call anything. In which step was its next all-reduce?",
            "paired_with_its_step": "Write down the steps in which rank 2 did all-reduce its gradient. Which is "
            "the second one?",
        },
    ),
    "1.f": Prediction(
        question="Which collective got tensors of different shapes, which rank is different, and how many "
        "elements did it pass?",
        answer={"number_of_the_collective": 2, "rank": 3, "elements": 1},
        why="#1 was the all-reduce of the count, and all ranks agreed on it. #2 was the all-gather. Rank 3 "
        "passed a single element to it and the others passed 3, because ten examples can't be divided evenly "
        "by four.",
        wrong={
            (
                "number_of_the_collective",
                1,
            ): "The first one was the all-reduce of the count, which is a single number on every rank.",
            "number_of_the_collective": "The report gives it after a #.",
            "rank": "Compare the shapes in the four lines of the report. Three of them are the same.",
            ("elements", 2): "Split 10 into chunks of 3. What's left after three of them?",
            ("elements", 3): "That's what the other ranks bring.",
            "elements": "The report shows the shape in that rank's line.",
        },
    ),
}
