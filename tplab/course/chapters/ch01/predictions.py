"""Prediction questions of chapter 01, with their answers. Three are about reports that the learner has just read."""

from tplab.course.checks import Prediction

PREDICTIONS = {
    "1.a": Prediction(
        question="counter = 0 in the notebook; each of 4 ranks adds 1 to it and returns it. The sum of what they "
        "return? And counter in the notebook afterwards?",
        answer={"sum_of_returned": 4, "in_the_notebook": 0},
        why="Each rank has a copy of its own, which goes from 0 to 1: four times 1. The notebook's own was never "
        "touched.",
        wrong={
            ("sum_of_returned", 10): "1 + 2 + 3 + 4 would be four ranks that share one counter. Do they share memory?",
            ("sum_of_returned", 16): "4 on every rank would need them to add up together. Did anybody send anything?",
            ("sum_of_returned", 1): "That is what one rank returns. And all four together?",
            "sum_of_returned": "What is counter on one rank, before and after it adds 1? And the sum over four ranks?",
            ("in_the_notebook", 4): "The ranks work on copies. Who would bring their numbers back into the notebook's?",
            "in_the_notebook": "The ranks are other processes, with copies. Who writes into the notebook's variable?",
        },
    ),
    "1.b": Prediction(
        question="Rank r holds 1, 2, 3, 4 times 10^r. What does rank 2 hold after a reduce-scatter? The last number "
        "of rank 1 after an all-to-all?",
        answer={"reduce_scatter_on_rank_2": 3333, "last_of_all_to_all_on_rank_1": 2000},
        why="The sum is 1111, 2222, 3333, 4444, and rank 2 gets the part with index 2. In the all-to-all rank 1 gets "
        "the part with index 1 of every rank, 2, 20, 200, 2000, in rank order.",
        wrong={
            ("reduce_scatter_on_rank_2", 2222): "Parts are counted from 0, as ranks are.",
            ("reduce_scatter_on_rank_2", 300): "That is rank 2's own part. It is added up over all ranks first.",
            "reduce_scatter_on_rank_2": "Write down the sum over the ranks, four numbers. Which one goes to rank 2?",
            ("last_of_all_to_all_on_rank_1", 40): "That is what rank 1 had. Which parts come to it, and from whom?",
            ("last_of_all_to_all_on_rank_1", 1000): "Parts are counted from 0, as ranks are.",
            (
                "last_of_all_to_all_on_rank_1",
                4000,
            ): "Rank 3 sends its part 3 to rank 3. Which one does it send to rank 1?",
            "last_of_all_to_all_on_rank_1": "The last comes from rank 3. Which of 1000, 2000, 3000, 4000 is meant for "
            "rank 1?",
        },
    ),
    "1.c": Prediction(
        question="In which line does rank 0 wait? Which rank would have to send? How many sends were entered?",
        answer={"line_of_rank_0": 6, "rank_that_should_send": 1, "sends_entered": 0},
        why="Both wait in recv in line 6; the sends stand in line 7, which nobody reaches. Each waits for what the "
        "other would do next.",
        wrong={
            ("line_of_rank_0", 7): "Line 7 sends. Read the line of the report that starts with 'rank 0:'.",
            "line_of_rank_0": "The line of the report that starts with 'rank 0:' names the line of the cell.",
            ("rank_that_should_send", 0): "Rank 0 is the one that waits. From whom does it want to receive?",
            "rank_that_should_send": "Rank 0 waits in a recv. From which rank?",
            "sends_entered": "The send stands below the recv. Did any rank come past its recv?",
        },
    ),
    "1.d": Prediction(
        question="Which rank is the odd one? Which number has the all-reduce that the others wait in? In which step "
        "did it skip? Which of its own steps met the others' step 1?",
        answer={"odd_rank": 2, "number_of_the_all_reduce": 3, "skipped_step": 1, "paired_with_its_step": 2},
        why="The others enter three all-reduces, rank 2 only two: those of steps 0 and 2. Its second, of step 2, was "
        "taken for the others' second, of step 1; and their third waits for one that never comes, since rank 2 has "
        "returned.",
        wrong={
            "odd_rank": "The report's first sentence names a rank that never joined.",
            (
                "number_of_the_all_reduce",
                2,
            ): "Rank 2 skipped the one of step 1, but its next call was taken for that one. "
            "Which number does the report name?",
            "number_of_the_all_reduce": "The report writes it behind a #. Counting starts at 1.",
            ("skipped_step", 2): "In step 2 rank 2's gradient is finite again. Where does the code put the inf?",
            "skipped_step": "Which step does the code spoil, for rank 2?",
            ("paired_with_its_step", 1): "In step 1 rank 2 called nothing. What was its next all-reduce?",
            "paired_with_its_step": "Write down the steps whose gradients rank 2 did all-reduce, in order. The second "
            "one?",
        },
    ),
    "1.e": Prediction(
        question="Which number has the collective that is not the same everywhere? Which rank brought how many "
        "elements?",
        answer={"number_of_the_collective": 2, "rank": 3, "elements": 1},
        why="The all-reduce of the count was #1 and the same everywhere. In #2, the all-gather, rank 3 brings 1 "
        "element and the others 3: ten examples don't divide by four.",
        wrong={
            ("number_of_the_collective", 1): "The first was the all-reduce of the count, a single number everywhere.",
            "number_of_the_collective": "The report writes it behind a #.",
            "rank": "Compare the shapes in the four lines of the report: three are alike.",
            ("elements", 2): "10 in chunks of 3: 3, 3, 3, and what remains?",
            ("elements", 3): "That is what the other ranks bring.",
            "elements": "The shape stands in the line of that rank.",
        },
    ),
    "1.f": Prediction(
        question="8 MiB, p = 8: MiB sent by each rank of a ring, by rank 0 of a tree? Steps of each?",
        answer={"ring_mib": 14, "tree_mib": 24, "ring_steps": 14, "tree_steps": 6},
        why="Ring: 2 · 7 messages of 1 MiB. Tree: three levels; rank 0 sends the whole 8 MiB to three others on the "
        "way down, and nothing on the way up.",
        wrong={
            ("ring_mib", 7): "That is the reduce-scatter alone. The all-gather sends as much again.",
            ("ring_mib", 16): "2N is the limit for very many ranks. With p = 8 it is 2(p-1)/p of N.",
            ("ring_mib", 112): "Each message is a p-th of the tensor.",
            "ring_mib": "2(p-1) messages, each of a p-th of 8 MiB.",
            ("tree_mib", 48): "On the way up rank 0 only receives.",
            ("tree_mib", 56): "Rank 0 doesn't serve all seven: those it has sent to pass it on.",
            "tree_mib": "On the way down rank 0 sends once in each step. How many steps, and how large is a message?",
            ("ring_steps", 7): "Once round to add up, and once more to hand out.",
            "ring_steps": "p - 1 for the reduce-scatter, and as many for the all-gather.",
            ("tree_steps", 3): "Up, and down again.",
            "tree_steps": "The number of times that 8 can be halved, up and down.",
        },
    ),
}
