"""Wrong answers to the exercises of chapter 00, and what each must be told."""

from tests.wrong_answers import WrongAnswer, swap_all

COUNT = """
def parameter_count(config):
    h, bias = config.hidden_size, int(config.bias)
    kv = config.kv_heads * config.head_dim
    norm = h + bias * h
    q = h * h + bias * h
    k = h * kv + bias * kv
    out = h * h + bias * h
    up = h * config.ffn_size + bias * config.ffn_size
    down = config.ffn_size * h + bias * h
    gate = up if config.gated else 0
    tables = config.vocab_size * h * (1 if config.tied_embedding else 2)
    positions = config.seq_length * h if config.learned_positions else 0
    layer = 2 * norm + q + 2 * k + out + gate + up + down
    return tables + positions + config.num_layers * layer + norm
"""


def count(*pairs: tuple[str, str]) -> str:
    return swap_all(COUNT, *pairs)


PARAMETERS = [
    ("one layer", count(("config.num_layers * layer", "layer")), "How many layers does the model have"),
    ("everything in each layer", count(("tables + positions + config.num_layers * layer + norm", "config.num_layers * (tables + positions + layer + norm)")), "The embedding is there once"),
    ("no positions", count(("tables + positions +", "tables +")), "Where is the table of positions"),
    ("positions always", count((" if config.learned_positions else 0", "")), "Does this model learn positions"),
    ("tied counted twice", count(("(1 if config.tied_embedding else 2)", "2")), "See tied_embedding"),
    ("untied counted once", count(("(1 if config.tied_embedding else 2)", "1")), "See tied_embedding"),
    ("tied the wrong way round", count(("1 if config.tied_embedding else 2", "2 if config.tied_embedding else 1")), "See tied_embedding"),
    ("the head has a bias", count(("layer + norm", "layer + norm + config.vocab_size")), "Has the output layer a bias"),
    ("no norms", count(("2 * norm + q", "q"), ("layer + norm", "layer")), "Each norm has parameters too"),
    ("no last norm", count(("layer + norm", "layer")), "There is one more norm"),
    ("one norm in a layer", count(("2 * norm + q", "norm + q")), "How many norms has a layer"),
    ("three norms in a layer", count(("2 * norm + q", "3 * norm + q")), "How many norms has a layer"),
    ("no biases at all", count(("int(config.bias)", "0")), "Where are the biases?"),
    ("no biases of linear layers", count(("+ bias * h\n    k", "\n    k"), ("+ bias * kv", ""), ("+ bias * h\n    up", "\n    up"), ("+ bias * config.ffn_size", ""), ("+ bias * h\n    gate", "\n    gate")), "Where are the biases of the linear layers"),
    ("a norm without its bias", count(("h + bias * h\n    q", "h\n    q")), "A LayerNorm has a weight and a bias"),
    ("RMSNorm with a bias", count(("norm = h + bias * h", "norm = 2 * h")), "These norms are RMSNorms"),
    ("biases whatever the configuration says", count(("int(config.bias)", "1")), "Does this model have any bias"),
    ("biases in all linear layers, whatever the configuration says", count(("int(config.bias)", "1"), ("norm = h + bias * h", "norm = h + int(config.bias) * h")), "Have the linear layers of this model a bias"),
    ("the bias of up is as long as its input", count(("+ bias * config.ffn_size", "+ bias * h")), "How long is the bias of `up`"),
    ("the bias of down is as long as its input", count(("down = config.ffn_size * h + bias * h", "down = config.ffn_size * h + bias * config.ffn_size")), "How long is the bias of `down`"),
    ("K and V as large as Q", count(("config.kv_heads * config.head_dim", "h")), "K and V have kv_heads heads here"),
    ("K as large as Q", count(("q + 2 * k", "q + k + q")), "K and V both have fewer heads"),
    ("kv_heads times h", count(("config.kv_heads * config.head_dim", "config.kv_heads")), "Which of these lines"),
    ("no V", count(("2 * k", "k")), "Attention has four matrices"),
    ("no Q, K and V", count((" + q + 2 * k", "")), "Where are Q, K and V"),
    ("no out", count((" + out", "")), "Attention has four matrices"),
    ("always 4h", count(("config.ffn_size", "4 * h")), "Is the inner size of the MLP always 4h"),
    ("no way back in the MLP", count((" + down", "")), "Where is the way back"),
    ("gate always", count((" if config.gated else 0", "")), "Has this MLP a gate"),
    ("gate never", count(("up if config.gated else 0", "0")), "This MLP is gated"),
    ("the gate has no bias", count(("gate = up if", "gate = h * config.ffn_size if")), "The gate has a bias as well"),
    ("a matrix for each head", count(("2 * norm + q + 2 * k + out", "2 * norm + config.num_heads * (q + 2 * k) + out")), "Which of these lines"),
    ("12 L h² as one reads it everywhere", "def parameter_count(config):\n    return 12 * config.num_layers * config.hidden_size**2\n", "Which of these lines"),
    ("12 L h² + v h", "def parameter_count(config):\n    return 12 * config.num_layers * config.hidden_size**2 + config.vocab_size * config.hidden_size\n", "Which of these lines"),
    ("matrices only", count(("int(config.bias)", "0"), ("norm = h + bias * h", "norm = 0")), "These are the matrices"),
    ("bytes", count(("return tables + positions + config.num_layers * layer + norm", "return 2 * (tables + positions + config.num_layers * layer + norm)")), "Count numbers, not bytes"),
    ("Q as narrow as K", count(("q = h * h", "q = h * kv")), "Only K and V have kv_heads heads"),
    ("Q as narrow as K, its bias too", count(("q = h * h + bias * h", "q = h * kv + bias * kv")), "Only K and V have kv_heads heads"),
    ("out as narrow as K", count(("out = h * h", "out = kv * h")), "Only K and V have kv_heads heads"),
    ("all of attention as narrow as K", count(("q + 2 * k + out", "4 * k")), "Only K and V have kv_heads heads"),
    ("the biases of K and V are as long as their input", count(("bias * kv", "bias * h")), "How long are the biases of K and V"),
    ("no biases in attention", count(("q = h * h + bias * h", "q = h * h"), ("+ bias * kv", ""), ("out = h * h + bias * h", "out = h * h")), "in the biases of q, k, v and `out`"),
    ("no norms in the layers", count(("2 * norm + q", "q")), "as many as in its two norms"),
    ("no biases in the MLP", count(("+ bias * config.ffn_size", ""), ("down = config.ffn_size * h + bias * h", "down = config.ffn_size * h")), "Where are the biases of the MLP"),
    ("no bias of up", count(("+ bias * config.ffn_size", "")), "or in that of `up`"),
    ("the bias of the gate is as long as its input", count(("gate = up if", "gate = h * config.ffn_size + bias * h if")), "How long is the bias of the gate"),
    ("the last norm without its bias", count(("layer + norm", "layer + h")), "The last norm is a LayerNorm as well"),
    ("the last norm in every layer", count(("2 * norm + q", "3 * norm + q"), ("layer + norm", "layer")), "The last norm is there once"),
    ("no embedding", count(("return tables +", "return tables - config.vocab_size * h +")), "Where is the embedding"),
    ("reads num_kv_heads", count(("config.kv_heads", "config.num_kv_heads")), "num_kv_heads may be None"),
    ("reads ffn_hidden_size", count(("config.ffn_size", "config.ffn_hidden_size")), "are always numbers"),
    ("returns nothing", count(("return tables", "total = tables")), "should return one whole number"),
    ("a string", count(("return tables + positions + config.num_layers * layer + norm", "return f'{tables + positions + config.num_layers * layer + norm:,}'")), "should return one whole number"),
]  # fmt: skip

STATE = """
def state_bytes(parameters, optimizer, mixed_precision):
    number = 2 if mixed_precision else 4
    averages = {"sgd": 0, "momentum": 1, "adam": 2}[optimizer]
    copy = 4 if mixed_precision else 0
    return {
        "weights": number * parameters,
        "gradients": number * parameters,
        "optimizer": (copy + 4 * averages) * parameters,
    }
"""


def state(*pairs: tuple[str, str]) -> str:
    return swap_all(STATE, *pairs)


BYTES = [
    ("numbers, not bytes", state(("2 if mixed_precision else 4", "1")), "Count bytes, not numbers"),
    ("always float32", state(("2 if mixed_precision else 4", "4")), "In mixed precision weights and gradients are 16-bit"),
    ("always 16 bits", state(("2 if mixed_precision else 4", "2")), "Here everything is float32"),
    ("gradients in float32", state(('"gradients": number', '"gradients": 4')), "In mixed precision weights and gradients are 16-bit"),
    ("the copy among the weights", state(('"weights": number', '"weights": (number + copy)'), ("copy + 4 * averages", "4 * averages")), "The float32 copy of the weights belongs to the optimizer"),
    ("no copy", state(("copy + 4 * averages", "4 * averages")), "keeps one thing more"),
    ("no copy for SGD", state(("copy = 4 if mixed_precision", "copy = 4 if mixed_precision and averages")), "keeps one thing more"),
    ("a copy of 16 bits", state(("copy = 4", "copy = 2")), "copy of the weights is in float32"),
    ("a copy always", state(("copy = 4 if mixed_precision else 0", "copy = 4")), "What does plain SGD remember"),
    ("16-bit averages", state(("copy + 4 * averages", "copy + number * averages")), "in 16 bits or in float32"),
    ("averages in 16 bits, always", state(("copy + 4 * averages", "copy + 2 * averages")), "Which numbers does this optimizer remember for each"),
    ("everything of the optimizer in 16 bits", state(("copy = 4", "copy = 2"), ("4 * averages", "number * averages")), "copy of the weights is in float32"),
    ("the float32 gradients stay", state(("copy = 4", "copy = 8")), "as the optimizer with float32 gradients"),
    ("a copy for Adam, always", state(("copy = 4 if mixed_precision else 0", "copy = 4 if mixed_precision or optimizer == 'adam' else 0")), "What does Adam keep of its own"),
    ("in GB", state(('"weights": number', '"weights": 1e-9 * number')), "One number of 32 bits for each"),
    ("Adam with one average", state(('"adam": 2', '"adam": 1')), "Adam keeps two running averages"),
    ("Adam with nothing", state(('"adam": 2', '"adam": 0')), "Adam remembers something"),
    ("momentum with two", state(('"momentum": 1', '"momentum": 2')), "Momentum is one running average"),
    ("momentum with nothing", state(('"momentum": 1', '"momentum": 0')), "when it has momentum"),
    ("SGD with one", state(('"sgd": 0', '"sgd": 1')), "What does plain SGD remember"),
    ("no gradients", state(('"gradients": number', '"gradients": 0')), "Every parameter has a weight and"),
    ("the sum", state(("    return {", "    parts = {")) + "    return sum(parts.values())\n", "should return a dict with the keys"),
    ("a tuple", "def state_bytes(parameters, optimizer, mixed_precision):\n    return 4 * parameters, 4 * parameters, 8 * parameters\n", "should return a dict with the keys"),
    ("another key", state(('"optimizer": (', '"optimizer state": (')), "should return a dict with the keys"),
    ("16 bytes whatever is asked", "def state_bytes(parameters, optimizer, mixed_precision):\n    return {'weights': 2 * parameters, 'gradients': 2 * parameters, 'optimizer': 12 * parameters}\n", "Here everything is float32"),
    ("another name of the optimizer", state(('"momentum"', '"sgd with momentum"')), 'The second argument is "sgd"'),
    ("the total in each entry", state(('"weights": number', '"weights": (2 * number + copy + 4 * averages)')), "That is all three together"),
]  # fmt: skip

RANK = """
def rank_bytes(config, p, micro_batch=1):
    b, h, s, a, L = micro_batch, config.hidden_size, config.seq_length, config.num_heads, config.num_layers
    divided = 12 * h * h + 7 * h
    whole = 6 * h
    embedding = math.ceil(config.vocab_size / p) * h
    ends = s * h + 2 * h
    parameters = L * (divided // p + whole) + embedding + ends
    activations = s * b * (10 * h + 24 * h // p + 5 * a * s // p)
    return 16 * parameters + L * activations
"""
SEARCH = """
def smallest_p(config, gpu_bytes, micro_batch=1, largest=8):
    sizes = [p for p in range(1, largest + 1) if config.num_heads % p == 0]
    for p in sizes:
        if rank_bytes(config, p, micro_batch) <= gpu_bytes:
            return p
    need = rank_bytes(config, sizes[-1], micro_batch)
    raise ValueError(f"even at p = {sizes[-1]} a rank needs {need} bytes, and the GPU has {gpu_bytes}")
"""


def rank(*pairs: tuple[str, str]) -> str:
    return swap_all(RANK, *pairs) + SEARCH


def search(*pairs: tuple[str, str]) -> str:
    return RANK + swap_all(SEARCH, *pairs)


TOTAL = "16 * parameters + L * activations"
SMALLEST = [
    ("no activations", rank((TOTAL, "16 * parameters")), "Where are the activations"),
    ("no states", rank((TOTAL, "L * activations")), "Where are the 16 bytes"),
    ("parameters, not bytes", rank(("16 * parameters", "parameters")), "numbers of parameters, plus bytes"),
    ("weights only", rank(("16 * parameters", "2 * parameters")), "How many bytes does Adam in mixed precision keep"),
    ("weights and gradients only", rank(("16 * parameters", "4 * parameters")), "How many bytes does Adam in mixed precision keep"),
    ("18 bytes", rank(("16 * parameters", "18 * parameters")), "How many bytes does Adam in mixed precision keep"),
    ("activations of one layer", rank(("L * activations", "activations")), "These are the activations of one layer"),
    ("the layers counted twice", rank(("+ 5 * a * s // p)", "+ 5 * a * s // p) * L")), "Are the layers counted twice in the activations"),
    ("micro_batch ignored", rank(("b, h, s", "_, h, s"), ("s * b *", "s *")), "Where is micro_batch in your formula"),
    ("states times micro_batch", rank(("16 * parameters", "16 * parameters * b")), "does not depend on the data"),
    ("everything times micro_batch", rank(("s * b *", "s *"), (TOTAL, "b * (16 * parameters + L * activations)")), "does not depend on the data"),
    ("p ignored", rank(("b, h, s, a, L =", "p = 1\n    b, h, s, a, L =")), "This is p = 1"),
    ("everything divided by p", "def rank_bytes(config, p, micro_batch=1):\n    return whole_bytes(config, 1, micro_batch) / p\n" + swap_all(RANK, ("rank_bytes", "whole_bytes")) + SEARCH, "Not everything is divided by p"),
    ("everything divided by p, in whole bytes", "def rank_bytes(config, p, micro_batch=1):\n    return whole_bytes(config, 1, micro_batch) // p\n" + swap_all(RANK, ("rank_bytes", "whole_bytes")) + SEARCH, "Not everything is divided by p"),
    ("all states divided by p", rank(("math.ceil(config.vocab_size / p)", "config.vocab_size"), ("divided // p", "divided"), ("16 * parameters +", "16 * parameters / p +")), "The states are not all divided by p"),
    ("states not divided", rank(("math.ceil(config.vocab_size / p)", "config.vocab_size"), ("divided // p", "divided")), "divided by nothing"),
    ("activations not divided", rank(("24 * h // p", "24 * h"), ("s // p)", "s)")), "These activations are those of p = 1"),
    ("activations all divided", rank(("10 * h + 24 * h // p", "34 * h // p")), "Which term of the formula has no p under it"),
    ("activations divided once more", rank((TOTAL, "16 * parameters + L * activations // p")), "divided by p once more"),
    ("activations not divided, states all divided", rank(("math.ceil(config.vocab_size / p)", "config.vocab_size"), ("divided // p", "divided"), ("16 * parameters +", "16 * parameters / p +"), ("24 * h // p", "24 * h"), ("s // p)", "s)")), "Are the activations divided by nothing"),
    ("the other term divided", rank(("10 * h + 24 * h // p", "10 * h // p + 24 * h")), "Print both in yours"),
    ("scores not divided", rank(("s // p)", "s)")), "Are the scores divided by p"),
    ("no scores", rank((" + 5 * a * s // p", "")), "Which of the two is off"),
    ("embedding whole", rank(("math.ceil(config.vocab_size / p)", "config.vocab_size")), "Does every rank hold the whole embedding"),
    ("vocabulary rounded down", rank(("math.ceil(config.vocab_size / p)", "(config.vocab_size // p)")), "is it rounded up or down"),
    ("vocabulary not rounded", rank(("math.ceil(config.vocab_size / p)", "config.vocab_size / p")), "What happens to the last rows"),
    ("positions divided", rank(("s * h + 2 * h", "s * h // p + 2 * h")), "Is the table of positions divided"),
    ("all biases divided", rank(("7 * h", "9 * h"), ("6 * h", "4 * h")), "Are the biases of `out` and `down` divided"),
    ("the bias of down divided", rank(("7 * h", "8 * h"), ("6 * h", "5 * h")), "Two biases are added after a sum"),
    ("no bias divided", rank(("12 * h * h + 7 * h", "12 * h * h"), ("6 * h", "13 * h")), "Which biases belong to the columns"),
    ("the biases of Q, K and V whole", rank(("7 * h", "4 * h"), ("6 * h", "9 * h")), "How many of their biases"),
    ("the bias of up whole", rank(("7 * h", "3 * h"), ("6 * h", "10 * h")), "How much of its bias"),
    ("norms divided too", rank(("7 * h", "11 * h"), ("6 * h", "2 * h"), ("+ 2 * h\n", "+ 2 * h // p\n")), "Are the norms divided"),
    ("everything but the embedding divided", rank(("L * (divided // p + whole) + embedding + ends", "(L * (divided + whole) + ends) // p + embedding")), "What stays whole"),
    ("a bias forgotten", rank(("7 * h", "4 * h")), "is that of exercise 0.1"),
    ("norms forgotten", rank(("whole = 6 * h", "whole = 2 * h")), "Which of the two is off"),
    ("returns nothing", rank(("return 16", "_ = 16")), "should return one whole number"),
    ("less than, not at most", search(("<= gpu_bytes", "< gpu_bytes")), "is smaller and fits"),
    ("the largest that fits", search(("for p in sizes:", "for p in sizes[::-1]:")), "in which order"),
    ("powers of two only", search(("for p in range(1, largest + 1) if config.num_heads % p == 0", "for p in (1, 2, 4, 8) if p <= largest and config.num_heads % p == 0")), "p = 3 is smaller and fits"),
    ("heads cut in pieces", search((" if config.num_heads % p == 0", "")), "Each rank takes whole heads"),
    ("micro_batch is not passed on", search(("(config, p, micro_batch) <=", "(config, p) <=")), "Is that at most"),
    ("largest is ignored", search(("range(1, largest + 1)", "range(1, 9)")), "Which p does your loop try"),
    ("stops before largest", search(("range(1, largest + 1)", "range(1, largest)")), "does not name"),
    ("largest is always returned", "def smallest_p(config, gpu_bytes, micro_batch=1, largest=8):\n    return largest\n" + RANK, "Each rank takes whole heads"),
    ("returns None where nothing fits", search(("    raise ValueError", "    return None\n    raise ValueError")), "come after the loop"),
    ("returns the largest where nothing fits", search(("    raise ValueError", "    return sizes[-1]\n    raise ValueError")), "come after the loop"),
    ("another error", search(("raise ValueError", "raise RuntimeError")), "come after the loop"),
    ("an error that does not say how much", search(('f"even at p = {sizes[-1]} a rank needs {need} bytes, and the GPU has {gpu_bytes}"', '"does not fit"')), "does not name"),
    ("an error that does not name p", search(("even at p = {sizes[-1]} ", "")), "its message does not name"),
    ("returns all that fit", search(("            return p\n", "            return [q for q in sizes if rank_bytes(config, q, micro_batch) <= gpu_bytes]\n")), "It should return one whole number, p"),
    ("the state divided by the GPU", "def smallest_p(config, gpu_bytes, micro_batch=1, largest=8):\n    return math.ceil(rank_bytes(config, 1, micro_batch) / gpu_bytes)\n" + RANK, "At p = 2 a rank needs"),
    ("names largest, which was not tried", search(("even at p = {sizes[-1]}", "even at p = {largest}")), "is the largest p that was tried"),
    ("cuts the hidden size, not the heads", search(("config.num_heads % p", "config.hidden_size % p")), "num_heads = 12"),
    ("returns the bytes", search(("return p", "return rank_bytes(config, p, micro_batch)")), "Which p is it"),
    ("two sequences if not told", search(("micro_batch=1, largest", "micro_batch=2, largest")), "micro_batch is 1 and largest is 8"),
    ("up to 4 if not told", search(("largest=8", "largest=4")), "micro_batch is 1 and largest is 8"),
    ("names the bytes at p = 1", search(("rank_bytes(config, sizes[-1], micro_batch)", "rank_bytes(config, 1, micro_batch)")), "its message does not name"),
    ("doubles p until it fits", "def smallest_p(config, gpu_bytes, micro_batch=1, largest=8):\n    p = 1\n    while rank_bytes(config, p, micro_batch) > gpu_bytes:\n        p *= 2\n    return p\n" + RANK, "p = 3 is smaller and fits"),
    ("counts p up until it fits", "def smallest_p(config, gpu_bytes, micro_batch=1, largest=8):\n    p = 1\n    while rank_bytes(config, p, micro_batch) > gpu_bytes:\n        p += 1\n    return p\n" + RANK, "Each rank takes whole heads"),
    ("raises where it fits", search(("            return p", "            break")), "fits: a rank needs"),
]  # fmt: skip

WRONG = [
    WrongAnswer(exercise=exercise, name=name, source=source, says=says)
    for exercise, answers in (("0.1", PARAMETERS), ("0.2", BYTES), ("0.3", SMALLEST))
    for name, source, says in answers
]
