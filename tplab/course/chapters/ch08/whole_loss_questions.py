"""What the check of exercise 8.5 asks when a loss is wrong, and what known mistakes are called."""

from tplab.course.checks import Question, changed, has_kind, has_no_gradient

FEW = "at most six numbers a token travel"
SILENT = "nothing travels backward"

ALL_TOKENS = "the right sum divided by the number of all tokens"
SUM = "the sum over the tokens, not the mean"
PADDING = "what comes out if the padded columns take part in the softmax"
UNSMOOTHED = "the loss without label smoothing"
PADDED_SIZE = "what comes out if the smoothing is spread over the padded vocabulary's size"
LOCAL_SIZE = "what comes out if the smoothing is spread over v/p columns"
LOCAL_MEAN = "what comes out if the smoothing takes the mean logit of this rank's columns only"
OTHERS = "what comes out if the smoothing is spread over all ids but the target"
NOT_IGNORED = "what comes out if the ignored tokens count as tokens with target 0"
PER_TOKEN = "the loss of each token"
PADDING_ZERO = "what comes out if the padded columns have the logit 0 in the softmax"
IGNORED_COUNT = "what comes out if the losses of the ignored tokens are in the sum"
ONLY_MINUS_100 = "what comes out if only a target of -100 is ignored"
PADDING_SMOOTHED = "what comes out if the padded columns are in the mean logit of the smoothing"
AGAIN = "the right mean, added up over the ranks"
SIGN = "what comes out if the smoothing takes ε (target's logit - mean logit) away"

QUESTIONS = (
    Question(
        changed,
        "The caller still needs its logits and its targets, to count right answers for example. Which line writes into "
        "one of them? (masked_fill makes a new tensor, masked_fill_ does not.)",
    ),
    Question(
        has_kind("out", "none", "type", "structure", PER_TOKEN, "shape"),
        "One number comes out: the mean over the tokens that count. What does your last line return?",
    ),
    Question(
        has_kind("out", "nan"),
        "Padded columns that hold -inf are right for the softmax, since exp(-inf) = 0. Where else do you add them up, "
        "or multiply them by 0?",
    ),
    Question(
        has_kind("out", AGAIN),
        "Every rank has the mean already, and yours is p times as large. Which sum over the ranks is one too many?",
    ),
    Question(has_kind("out", SUM), "The sum is right. By what is it divided?"),
    Question(has_kind("out", ALL_TOKENS), "By how many tokens is the sum divided: by all, or by those that count?"),
    Question(
        has_kind("out", NOT_IGNORED),
        "An ignored token needs some id to be looked up, but its loss must not count. Where do you take it out again?",
    ),
    Question(
        has_kind("out", PADDING),
        "The softmax gives the padded columns a part of the probability. Which number as a logit has exp = 0? And how "
        "does a rank find out which of its columns are padding: which id has its column 0?",
    ),
    Question(
        has_kind("out", PADDING_ZERO),
        "A logit of 0 gives a padded column a part of the probability as well: exp(0) = 1. Which number has exp = 0?",
    ),
    Question(
        has_kind("out", IGNORED_COUNT),
        "The sum is divided by the right number, but the ignored tokens are in it, with the loss of the id that stands "
        "in for their target. Where do you take them out?",
    ),
    Question(
        has_kind("out", ONLY_MINUS_100),
        "Here `ignore_index` is another number, and a target with that number counts. Which line knows -100 only, or "
        "takes it that the number is negative?",
    ),
    Question(
        has_kind("out", PADDING_SMOOTHED),
        "The mean logit is that of the real ids. Which columns do you add up for it?",
    ),
    Question(
        has_kind("out", SIGN),
        "lse - (1 - ε) z_t - ε z̄ is lse - z_t plus ε (z_t - z̄). Which sign has yours?",
    ),
    Question(has_kind("out", UNSMOOTHED), "label_smoothing is not 0 here. Where does it enter your loss?"),
    Question(
        has_kind("out", PADDED_SIZE, LOCAL_SIZE),
        "The smoothing is spread evenly over the vocabulary. How many ids does it have, without padding, on all ranks "
        "together?",
    ),
    Question(
        has_kind("out", LOCAL_MEAN),
        "The mean logit is that of all ranks' columns, or every rank gets another loss. Who adds up the ranks' sums?",
    ),
    Question(
        has_kind("out", OTHERS),
        "As in F.cross_entropy, every id gets ε/v, the target too: it has 1 - ε + ε/v in all.",
    ),
    Question(
        lambda d: FEW in d.names,
        "More than a few numbers a token travel. Which of your messages is as large as the logits?",
    ),
    Question(
        lambda d: SILENT in d.names or has_kind("dlogits", "p times")(d),
        "Backward, the ranks have nothing to tell each other: the upstream gradient is one number that all of them "
        "have. Which of your sums adds up its gradient too?",
    ),
    Question(
        has_no_gradient("dlogits"),
        "The loss is right, but no gradient reaches the logits. Which line does autograd not see?",
    ),
    Question(
        lambda d: "out" not in d.names and "dlogits" in d.names,
        "The loss is right, its gradient is not. Which part of it does autograd not see: the loss of each token, the "
        "target's logit in the smoothing, or the mean logit? (dist.all_reduce is no g.)",
    ),
    Question(
        lambda d: "out" in d.names,
        "Take it apart: the loss of each token, with padding left out; plus ε (target's logit - mean logit); then the "
        "mean over the tokens that count. From which part on does yours differ?",
    ),
)

CRASH = (
    "Which of the steps fails: padded columns to -inf, a target that can be looked up for ignored tokens, the loss of "
    "each token, smoothing, the mean? ignore_index may be any id, and may be negative."
)
OUTSIDE = (
    "This id is no id of the vocabulary: it is negative, or it belongs to a padded column, and it is not ignore_index. "
    "Raise IndexError on every rank, before any collective. Compare with vocab_size, not with the number of columns."
)
