"""The table of symptoms that follows the experiments of chapter 15.

Each row names a symptom, which is what a learner may see, and the mistake that causes it.
"""

from tplab.course.checks import Symptom

SYMPTOMS = [
    Symptom(
        see="The norm of the gradient is m times that of a run with one micro-batch; the loss hardly shows it, since "
        "Adam divides by the size of its gradients",
        cause="Micro-batches are added up and not averaged; clipping bites in nearly every step",
        exercise="15.3",
    ),
    Symptom(
        see="With sequence parallelism the loss goes down a little slower, and no error is raised until a checkpoint "
        "finds copies that differ",
        cause="The gradients of norms and biases were not added up over the ranks",
        exercise="15.3",
    ),
    Symptom(
        see="The first steps after a checkpoint have a lower loss than those before it",
        cause="The data begin from the front again: the model sees text that it has seen",
        exercise="15.2",
    ),
    Symptom(
        see="Another number of replicas gives another loss curve, from the first step on",
        cause="Each replica shuffles for itself, or has a part of the text of its own",
        exercise="15.2",
    ),
    Symptom(
        see="The loss jumps in the first steps, or is no number",
        cause="No warm-up, or a learning rate that is too high for it",
        exercise="15.1",
    ),
    Symptom(
        see="A run can't be taken up: its newest checkpoint is incomplete",
        cause="Files are written, or deleted, under the name of a complete checkpoint",
        exercise="15.4",
    ),
    Symptom(
        see="Utilisation rises when layers are computed again, and tokens per second fall",
        cause="What is computed a second time is counted as if it were the model's",
        exercise="15.5",
    ),
    Symptom(
        see="A run that goes on at another tp, or on a GPU, differs in the last digits",
        cause="Nothing is wrong: sums are taken in another order",
    ),
]
