"""What the check of exercise 7.5 asks when a tied model is wrong."""

from tplab.course.checks import Question, has_kind, has_no_gradient

ONLY_LOOKUP = "the gradient of the look-up alone"
ONLY_OUTPUT = "the gradient of the output layer alone"
WITHOUT_F = "the gradient when the look-up learns through this rank's own logits only"
GIVEN_BODY = "the body is the module that was given"
WITHOUT_BODY = "what comes out when the body is left out"

WHOSE_GROUP = "The group goes to two places, the embedding and the logits. Which of them did not get it?"
CRASH = (
    "Follow the shapes: ids [b, s], vectors [b, s, h], the body's output [b, s, h], logits [b, s, v/p]. Which line "
    "gets another shape than it expects, or an argument that it doesn't know? "
    "(If the error is about dtypes: `device` and `dtype` are for the embedding.)"
)

QUESTIONS = (
    Question(
        lambda d: "parameters" in d.names,
        "The model has two parameters here: `embedding.weight`, this rank's rows, and that of `self.body`. Which of "
        "yours is one too many, missing, or has another shape or name?",
    ),
    Question(
        GIVEN_BODY,
        "The caller holds that module, and may have given its parameters to an optimizer. Which line makes another one "
        "of it?",
    ),
    Question(
        has_kind("out", "none", "type", "structure"),
        "What does forward return? The logits, one tensor.",
    ),
    Question(
        has_kind("out", WITHOUT_BODY),
        "These are the logits of the vectors themselves. Where does the body come in?",
    ),
    Question(
        has_kind("out", "shape", "whole", "part"),
        "Without gather the logits are [b, s, v/p], with gather [b, s, v], without the padding. What do `gather` and "
        "`vocab_size` have to reach for that?",
    ),
    Question(
        has_kind("dE", ONLY_LOOKUP),
        "The gradient of the output layer is missing. Does it use the parameter itself, or a copy that autograd keeps "
        "apart?",
    ),
    Question(
        has_kind("dE", ONLY_OUTPUT),
        "The gradient of the look-up is missing. Where, between the vectors and the body, does autograd lose the way?",
    ),
    Question(
        has_kind("dE", WITHOUT_F),
        "What comes back through the logits to the body is only this rank's part: dbody differs from rank to rank as "
        "well. Which operator sums it, and does your way to the logits go round it?",
    ),
    Question(
        has_no_gradient("dE", "dbody"),
        "A parameter gets no gradient. Which line does autograd not know about?",
    ),
    Question(
        lambda d: {"dE", "backward traffic"} <= d.names and not d.names & {"out", "dbody"},
        "What comes back from the body is whole on every rank, and so is the gradient of a row on the rank that has "
        "it. Which line adds one of them up over the ranks once more?",
    ),
    Question(
        has_kind("dbody", "p times"),
        "The body's gradient is summed over the ranks twice: f is in `parallel_logits` already. Which line does it "
        "again?",
    ),
    Question(
        lambda d: bool(d.names) and d.names <= {"forward traffic", "backward traffic"},
        "The numbers are right, the communication is not: g forward, f backward, and the gather only if asked for. "
        "Which call sends more?",
    ),
    Question(
        lambda d: "out" in d.names,
        "The logits are the body's output times the rows of the table: no scale, no bias. What else happens to them, "
        "or to the vectors before?",
    ),
)
