"""The table of symptoms at the end of chapter 09's "Break it" section.

Each row names a symptom, which is what a learner may see, and the mistake that causes it.
"""

from tplab.course.checks import Symptom

SYMPTOMS = [
    Symptom(
        see="The losses of the ranks differ from the first step on; replica drift grows",
        cause="Dropout with other masks in a replicated place: the ranks no longer hold the same residual stream",
        exercise="9.4",
    ),
    Symptom(
        see="Nothing: loss falls, replicas are equal. Only the masks of the ranks agree inside the MLP",
        cause="The same random state on all ranks in a sharded place: 1/p of the random numbers",
        exercise="9.4",
    ),
    Symptom(
        see="All shards of a weight are equal, and stay so",
        cause="Every rank drew its shard from the same seed",
        exercise="9.1",
    ),
    Symptom(
        see="Activations are larger than on one process, the more ranks the more so",
        cause="The standard deviation was computed from the shape of the shard",
        exercise="9.1",
    ),
    Symptom(
        see="Rank 1 of one stream or copy drops what rank 0 of another one drops",
        cause="Two seeds are equal: seed + rank has reached the next stream's seed",
        exercise="9.2",
    ),
    Symptom(
        see="Every training step drops the same places",
        cause="The fork starts from the seed each time: the state it ended with was not kept",
        exercise="9.3",
    ),
    Symptom(
        see="After an error that was caught, all later masks are others",
        cause="fork did not put the state back: no try ... finally",
        exercise="9.3",
    ),
    Symptom(
        see="With checkpointing the loss of the first step is right, its gradients are not",
        cause="The second run dropped other places: torch puts back its current state, nobody the tracker's",
        exercise="9.5",
    ),
    Symptom(
        see="A run that was stopped and continued does not go on as the uninterrupted one",
        cause="The tracker's states are not in the checkpoint, or those of one rank were loaded on all",
        exercise="9.3",
    ),
]
