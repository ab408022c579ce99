"""What the check of exercise 13.4 asks, and the descriptions that its questions look for."""

from tplab.course.checks import Question, has_kind, has_no_gradient

IN_ORDER = "the stage's work follows the list"
KEPT = "no more is kept than the list asks for"
UNWAITED = "every message was waited for"
SUM_OF_LOSSES = "the sum of the micro-batches' losses"
LAST_LOSS = "the loss of the last micro-batch alone"
MANY_TIMES = "m times the right one: the gradient of the sum of the losses"
LAST_ONLY = "the gradient of the last micro-batch alone"
LAST_ONLY_OVER_M = "the gradient of the last micro-batch alone, over m"

STUCK = (
    "For each rank, what does it wait for in the line that the report names? A send that you wait for at once waits "
    "for its receiver, and the receiver may be waiting for you: when is the result of lanes.send needed? Does each "
    "rank receive from the neighbour that sends, once for each micro-batch? And what must have happened to the sends "
    "before the function comes back?"
)

QUESTIONS = (
    Question(
        lambda d: UNWAITED in d.names,
        "lanes.send and lanes.receive only start a message. When may a received tensor be read? And what must have "
        "happened to the sends before the function comes back?",
    ),
    Question(
        lambda d: "changed" in d.kinds(),
        "The caller goes on using the micro-batches and the weights. Which line writes into one of them?",
    ),
    Question(
        lambda d: "the actions are as they were" in d.names,
        "The list of actions belongs to the caller. Which line changes it?",
    ),
    Question(
        has_kind("dW", MANY_TIMES),
        "Gradients of micro-batches add up in `.grad`: that is the gradient of the *sum* of their losses. The loss of "
        "the batch is their mean. Where does 1/m belong?",
    ),
    Question(
        has_kind("dW", LAST_ONLY, LAST_ONLY_OVER_M),
        "Only one micro-batch has left its gradient, and m of them should add up. Which line forgets the others?",
    ),
    Question(
        has_no_gradient("dW", "db"),
        "No gradient arrives at the weights of this stage. From which tensor does its backward begin, and with which "
        "gradient?",
    ),
    Question(
        lambda d: any("of something else" in row.text for row in d if row.name == IN_ORDER),
        "What goes into the stage is no micro-batch's activation. Was the message there when you read it? Is it a "
        "tensor of its own, or one that the next message writes into?",
    ),
    Question(
        lambda d: IN_ORDER in d.names,
        "Work through `actions` from front to back: an action's kind says forward or backward, its micro_batch says "
        "which one. Where does your order come from?",
    ),
    Question(
        lambda d: KEPT in d.names and not {"dW", "db", "loss"} & d.names,
        "The numbers are right, and too much is kept. What still holds a micro-batch's graph after its backward: an "
        "entry of a dictionary, a list of losses that were never detached, a message that was sent with its graph?",
    ),
    Question(
        lambda d: any("where None is right" in row.text for row in d if row.name == "loss"),
        "Only the last rank knows the loss. What do the others return?",
    ),
    Question(
        has_kind("loss", SUM_OF_LOSSES, LAST_LOSS),
        "The loss of the batch is the mean over its m micro-batches. What do you return?",
    ),
    Question(
        lambda d: d.names == {"loss"},
        "The gradients are right. What does the last rank return: a number, the mean of the m losses?",
    ),
    Question(
        lambda d: d.names == {"messages"},
        "The numbers are right, but other messages were sent than have to be: m outputs to the next rank, m gradients "
        "to the one before. Who sends what too often?",
    ),
    Question(
        lambda d: "dW" in d.names and not {"db", "loss"} & d.names,
        "The gradient of the bias is right, that of the weight is not. It needs what went into the stage: what stands "
        "in that tensor when its backward comes? Does every message get memory of its own?",
    ),
    Question(
        lambda d: bool({"dW", "db"} & d.names) and "loss" not in d.names,
        "The forward pass is right. Follow the gradient: the last stage starts from its loss, every other from what it "
        "receives; and each sends on the gradient of *its input*. Is each received input a leaf of its own that "
        "requires a gradient?",
    ),
)
