"""The table of symptoms at the end of chapter 14's "Break it" section.

Each row names a symptom, which is what a learner may see, and the mistake that causes it.
"""

from tplab.course.checks import Symptom

SYMPTOMS = [
    Symptom(
        see="Loss and gradients change with the number of replicas when sequences have different lengths",
        cause="Means of each rank are averaged, in place of sums that are divided by the tokens of all",
        exercise="14.1",
    ),
    Symptom(
        see="Replicas drift apart from the first step, and no error is raised",
        cause="The hook reduced the parameter, or a copy of the gradient that nobody wrote back",
        exercise="14.1",
    ),
    Symptom(
        see="Right numbers, and a step takes as long as backward and all-reduce one after the other",
        cause="The all-reduces start when the backward pass is over, or each is waited for at once",
        exercise="14.1",
    ),
    Symptom(
        see="With ZeRO, weights differ between the ranks in all parts but their own",
        cause="The new shards were not gathered",
        exercise="14.2",
    ),
    Symptom(
        see="The norm grows with tp or dp, and more is clipped than on one process",
        cause="Replicated parameters, or whole replicas, are counted once for each rank that holds them",
        exercise="14.4",
    ),
    Symptom(
        see="Right numbers, and a step many times slower on two nodes than on one",
        cause="tp is not innermost: its messages, two in each layer forward and two backward, cross the nodes",
        exercise="14.3",
    ),
    Symptom(
        see="Ranks wait for each other in new_group, or in the first collective of a new group",
        cause="new_group was called by the members of the group only",
        exercise="14.3",
    ),
    Symptom(
        see="The first steps have one process's loss, later ones differ in the last digits only",
        cause="Nothing is wrong: sums are taken in another order",
    ),
]
