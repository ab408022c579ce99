"""The table of symptoms at the end of chapter 13's "Break it" section.

Each row names a symptom, which is what a learner may see, and the mistake that causes it.
"""

from tplab.course.checks import Symptom

SYMPTOMS = [
    Symptom(
        "Two neighbours both wait in recv",
        "The lists wait for each other in a circle: each rank wants what the other does later",
        "13.2",
    ),
    Symptom(
        "Two neighbours both wait in send; GPipe's lists run, 1F1B's do not",
        "Each send is waited for at once. Start it, go on, and wait at the end",
        "13.4",
    ),
    Symptom(
        "With SGD the loss blows up or falls too fast, with Adam all looks well",
        "1/m is missing: the gradients are m times too large",
        "13.4",
    ),
    Symptom(
        "The first loss is right, the weights of inner stages get wrong gradients",
        "One buffer for all receives: a later message overwrites an activation that backward still needs",
        "13.4",
    ),
    Symptom(
        "All is right with 1F1B, but the memory grows with m",
        "Something still holds the graphs: a list of losses, an entry that is never dropped",
        "13.4",
    ),
    Symptom(
        "The first loss is right, later ones drift away; the embedding and the output layer differ",
        "A tied table has a copy on the first and the last stage, and their gradients are not added up",
    ),
    Symptom(
        "All is right, and the first ranks run out of memory before the others",
        "Nothing is wrong: in 1F1B rank r holds p - r micro-batches",
        "13.3",
    ),
    Symptom(
        "Every rank idles most of the time, and nothing is wrong",
        "Too few micro-batches: the bubble is (p-1)/m",
        "13.1",
    ),
]
