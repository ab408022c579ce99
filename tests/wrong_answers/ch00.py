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
    ("everything in each layer", count(("tables + positions + config.num_layers * layer + norm", "config.num_layers * (tables + positions + layer + norm)")), "You counted the embedding in every layer"),
    ("no positions", count(("tables + positions +", "tables +")), "This model has a table of learned position embeddings"),
    ("positions always", count((" if config.learned_positions else 0", "")), "says learned_positions=False"),
    ("tied counted twice", count(("(1 if config.tied_embedding else 2)", "2")), "See `tied_embedding`"),
    ("untied counted once", count(("(1 if config.tied_embedding else 2)", "1")), "See `tied_embedding`"),
    ("tied the wrong way round", count(("1 if config.tied_embedding else 2", "2 if config.tied_embedding else 1")), "See `tied_embedding`"),
    ("the head has a bias", count(("layer + norm", "layer + norm + config.vocab_size")), "You seem to have counted a bias for the output layer"),
    ("no norms", count(("2 * norm + q", "q"), ("layer + norm", "layer")), "Norms have parameters, too"),
    ("no last norm", count(("layer + norm", "layer")), "one final norm after the last layer"),
    ("one norm in a layer", count(("2 * norm + q", "norm + q")), "Where in the layer does the second norm go"),
    ("three norms in a layer", count(("2 * norm + q", "3 * norm + q")), "How many norms did you count"),
    ("no biases at all", count(("int(config.bias)", "0")), "the linear layers and the LayerNorms have biases"),
    ("no biases of linear layers", count(("+ bias * h\n    k", "\n    k"), ("+ bias * kv", ""), ("+ bias * h\n    up", "\n    up"), ("+ bias * config.ffn_size", ""), ("+ bias * h\n    gate", "\n    gate")), "Each linear layer inside the model has a bias"),
    ("a norm without its bias", count(("h + bias * h\n    q", "h\n    q")), "A LayerNorm has a weight and a bias"),
    ("RMSNorm with a bias", count(("norm = h + bias * h", "norm = 2 * h")), "The norms of this model are RMSNorms"),
    ("biases whatever the configuration says", count(("int(config.bias)", "1")), "still include any biases"),
    ("biases in all linear layers, whatever the configuration says", count(("int(config.bias)", "1"), ("norm = h + bias * h", "norm = h + int(config.bias) * h")), "still include biases for the linear layers"),
    ("the bias of up is as long as its input", count(("+ bias * config.ffn_size", "+ bias * h")), "Does the bias of `up` have one element per input feature"),
    ("the bias of down is as long as its input", count(("down = config.ffn_size * h + bias * h", "down = config.ffn_size * h + bias * config.ffn_size")), "Does the bias of `down` have one element per input feature"),
    ("K and V as large as Q", count(("config.kv_heads * config.head_dim", "h")), "K and V have fewer heads than Q. What"),
    ("K as large as Q", count(("q + 2 * k", "q + k + q")), "You shrank the K matrix or the V matrix, but not both"),
    ("kv_heads times h", count(("config.kv_heads * config.head_dim", "config.kv_heads")), "Is one of these tensors missing"),
    ("no V", count(("2 * k", "k")), "Attention has four matrices"),
    ("no Q, K and V", count((" + q + 2 * k", "")), "include the matrices for Q, K, and V"),
    ("no out", count((" + out", "")), "Attention has four matrices"),
    ("always 4h", count(("config.ffn_size", "4 * h")), "Does every MLP have 4h hidden features"),
    ("no way back in the MLP", count((" + down", "")), "Which matrix maps them back"),
    ("gate always", count((" if config.gated else 0", "")), "says gated=False"),
    ("gate never", count(("up if config.gated else 0", "0")), "This MLP is gated"),
    ("the gate has no bias", count(("gate = up if", "gate = h * config.ffn_size if")), "so does the gate layer of the MLP"),
    ("a matrix for each head", count(("2 * norm + q + 2 * k + out", "2 * norm + config.num_heads * (q + 2 * k) + out")), "Is one of these tensors missing"),
    ("12 L h² as one reads it everywhere", "def parameter_count(config):\n    return 12 * config.num_layers * config.hidden_size**2\n", "Is one of these tensors missing"),
    ("12 L h² + v h", "def parameter_count(config):\n    return 12 * config.num_layers * config.hidden_size**2 + config.vocab_size * config.hidden_size\n", "Is one of these tensors missing"),
    ("matrices only", count(("int(config.bias)", "0"), ("norm = h + bias * h", "norm = 0")), "You counted all the matrices"),
    ("bytes", count(("return tables + positions + config.num_layers * layer + norm", "return 2 * (tables + positions + config.num_layers * layer + norm)")), "Did you count bytes instead of parameters"),
    ("Q as narrow as K", count(("q = h * h", "q = h * kv")), "applies only to K and V"),
    ("Q as narrow as K, its bias too", count(("q = h * h + bias * h", "q = h * kv + bias * kv")), "applies only to K and V"),
    ("out as narrow as K", count(("out = h * h", "out = kv * h")), "applies only to K and V"),
    ("all of attention as narrow as K", count(("q + 2 * k + out", "4 * k")), "applies only to K and V"),
    ("the biases of K and V are as long as their input", count(("bias * kv", "bias * h")), "Do the biases of K and V have one element per input feature"),
    ("no biases in attention", count(("q = h * h + bias * h", "q = h * h"), ("+ bias * kv", ""), ("out = h * h + bias * h", "out = h * h")), "the biases of `q`, `k`, `v`, and `out`"),
    ("no norms in the layers", count(("2 * norm + q", "q")), "A layer's two norms have 4h parameters"),
    ("no biases in the MLP", count(("+ bias * config.ffn_size", ""), ("down = config.ffn_size * h + bias * h", "down = config.ffn_size * h")), "The linear layers of the MLP have biases, too"),
    ("no bias of up", count(("+ bias * config.ffn_size", "")), "and so does the bias of `up`"),
    ("the bias of the gate is as long as its input", count(("gate = up if", "gate = h * config.ffn_size + bias * h if")), "Does the bias of the gate layer have one element per input feature"),
    ("the last norm without its bias", count(("layer + norm", "layer + h")), "The final norm is a LayerNorm, too"),
    ("the last norm in every layer", count(("2 * norm + q", "3 * norm + q"), ("layer + norm", "layer")), "You counted the final norm in every layer"),
    ("no embedding", count(("return tables +", "return tables - config.vocab_size * h +")), "The embedding has one vector for each token"),
    ("reads num_kv_heads", count(("config.kv_heads", "config.num_kv_heads")), "num_kv_heads and ffn_hidden_size may be None"),
    ("reads ffn_hidden_size", count(("config.ffn_size", "config.ffn_hidden_size")), "are always numbers"),
    ("returns nothing", count(("return tables", "total = tables")), "should return a whole number"),
    ("a string", count(("return tables + positions + config.num_layers * layer + norm", "return f'{tables + positions + config.num_layers * layer + norm:,}'")), "should return a whole number"),
]  # fmt: skip

STATE = """
def state_bytes(shape, optimizer, mixed_precision):
    n = shape[0] * shape[1]
    kept = {"sgd": 0, "momentum": n, "adam": 2 * n, "amsgrad": 3 * n, "adafactor": sum(shape)}[optimizer]
    size = 2 if mixed_precision else 4
    copy = 4 * n if mixed_precision else 0
    return {"weights": size * n, "gradients": size * n, "optimizer": copy + 4 * kept}
"""


def state(*pairs: tuple[str, str]) -> str:
    return swap_all(STATE, *pairs)


BYTES = [
    ("elements, not bytes", state(("size = 2 if mixed_precision else 4", "size = 1")), "This is the number of elements"),
    ("elements of the optimizer", state(("copy + 4 * kept", "copy + kept")), "This is the number of elements"),
    ("always float32", state(("2 if mixed_precision else 4", "4")), "In mixed precision, weights and gradients are stored in 16 bits"),
    ("always 16 bits", state(("2 if mixed_precision else 4", "2")), "everything is stored in float32"),
    ("gradients in float32", state(('"gradients": size', '"gradients": 4')), "In mixed precision, weights and gradients are stored in 16 bits"),
    ("the copy among the weights", state(('"weights": size * n', '"weights": size * n + copy'), ("copy + 4 * kept", "4 * kept")), "You included the float32 copy of the weights"),
    ("no copy", state(("copy + 4 * kept", "4 * kept")), "keeps an extra tensor"),
    ("no copy for SGD", state(("if mixed_precision else 0", "if mixed_precision and kept else 0")), "keeps an extra tensor"),
    ("a copy of 16 bits", state(("copy = 4", "copy = 2")), "copy of the weights is in float32"),
    ("a copy always", state(("copy = 4 * n if mixed_precision else 0", "copy = 4 * n")), "Does a step of plain SGD read anything from the previous step"),
    ("running averages in 16 bits", state(("copy + 4 * kept", "copy + size * kept")), "running averages in 16 bits"),
    ("everything of the optimizer in 16 bits", state(("copy = 4", "copy = 2"), ("4 * kept", "size * kept")), "copy of the weights is in float32"),
    ("the float32 gradients stay", state(("copy = 4", "copy = 8")), "or it includes float32 gradients"),
    ("in GB", state(('"weights": size', '"weights": 1e-9 * size')), "There's one 32-bit value"),
    ("Adam with one average", state(('"adam": 2', '"adam": 1')), "Adam's next step needs two running averages"),
    ("Adam with nothing", state(('"adam": 2 * n', '"adam": 0')), "Adam's next step needs the old m and the old v"),
    ("Adam remembers its gradient", state(('"adam": 2', '"adam": 3')), "Which variables does the next step read"),
    ("AMSGrad like Adam", state(('"amsgrad": 3', '"amsgrad": 2')), "Does the next step of AMSGrad also read the previous value of u"),
    ("AMSGrad remembers only the maximum", state(('"amsgrad": 3', '"amsgrad": 1')), "Which variables does the next step read"),
    ("momentum with two", state(('"momentum": n', '"momentum": 2 * n')), "only m carries over"),
    ("momentum with nothing", state(('"momentum": n', '"momentum": 0')), "the next update needs the previous m"),
    ("SGD with one", state(('"sgd": 0', '"sgd": n')), "Does a step of plain SGD read anything from the previous step"),
    ("Adafactor with a matrix", state(('"adafactor": sum(shape)', '"adafactor": n')), "r and c aren't matrices"),
    ("Adafactor with two matrices", state(('"adafactor": sum(shape)', '"adafactor": 2 * n')), "r and c aren't matrices"),
    ("Adafactor without columns", state(('"adafactor": sum(shape)', '"adafactor": shape[0]')), "What about the means of the columns"),
    ("Adafactor without rows", state(('"adafactor": sum(shape)', '"adafactor": shape[1]')), "What about the means of the rows"),
    ("Adafactor twice the longer side", state(('"adafactor": sum(shape)', '"adafactor": 2 * max(shape)')), "Which variables does the next step read"),
    ("no gradients", state(('"gradients": size * n', '"gradients": 0')), "has both a value and a gradient"),
    ("the sum", state(("    return {", "    parts = {")) + "    return sum(parts.values())\n", "should return a dict with the keys"),
    ("a tuple", "def state_bytes(shape, optimizer, mixed_precision):\n    n = shape[0] * shape[1]\n    return 4 * n, 4 * n, 8 * n\n", "should return a dict with the keys"),
    ("another key", state(('"optimizer": copy', '"optimizer state": copy')), "should return a dict with the keys"),
    ("16 bytes whatever is asked", "def state_bytes(shape, optimizer, mixed_precision):\n    n = shape[0] * shape[1]\n    return {'weights': 2 * n, 'gradients': 2 * n, 'optimizer': 12 * n}\n", "everything is stored in float32"),
    ("another name of the optimizer", state(('"momentum"', '"sgd with momentum"')), 'The second argument is "sgd"'),
    ("the total in each entry", state(('"weights": size * n', '"weights": 2 * size * n + copy + 4 * kept')), "This value is the sum of the weights, the gradients, and the optimizer state"),
    ("the total in the last entry", state(("copy + 4 * kept", "2 * size * n + copy + 4 * kept")), "This value is the sum of the weights, the gradients, and the optimizer state"),
]  # fmt: skip

VALIDATE = """
def average_loss(model, batches):
    total, count = 0.0, 0
    with torch.no_grad():
        for ids, targets in batches:
            total += model(ids, targets).item()
            count += 1
    return total / count
"""


def validate(*pairs: tuple[str, str]) -> str:
    return swap_all(VALIDATE, *pairs)


NO_GRAD = ("    with torch.no_grad():\n", "    if True:\n")
LOOP = [
    ("as shipped", validate(NO_GRAD, (".item()", ""), ("0.0, 0", "torch.zeros(()), 0")), "still has an autograd graph"),
    ("as shipped, and float at the end", validate(NO_GRAD, (".item()", ""), ("return total", "return float(total)")), "holds the activations of several batches"),
    ("a list of losses, detached at the end", validate(NO_GRAD, ("total, count = 0.0, 0", "losses = []"), ("total += model(ids, targets).item()\n            count += 1", "losses.append(model(ids, targets))"), ("return total / count", "return torch.stack(losses).mean().item()")), "holds the activations of several batches"),
    ("item, but autograd runs", validate(NO_GRAD), "keeps the activations of one batch"),
    ("detaches the loss", validate(NO_GRAD, (".item()", ".detach()")), "keeps the activations of one batch"),
    ("a backward pass to free them", validate(NO_GRAD, ("total += model(ids, targets).item()", "loss = model(ids, targets)\n            loss.backward()\n            total += loss.item()")), "Which of your lines changes"),
    ("freezes the model", validate(NO_GRAD, ("    total, count", "    model.requires_grad_(False)\n    total, count")), "Which of your lines changes"),
    ("leaves the model in eval mode", validate(("    total, count", "    model.eval()\n    total, count")), "does it restore the old mode"),
    ("always switches to train mode", validate(("    total, count", "    model.eval()\n    total, count"), ("    return", "    model.train()\n    return")), "does it restore the old mode"),
    ("switches autograd off", validate(("    with torch.no_grad():\n", "    torch.set_grad_enabled(False)\n    if True:\n")), "turn autograd back on"),
    ("the sum", validate(("return total / count", "return total")), "You returned the sum of the losses"),
    ("weighted by the batch size", validate((".item()", ".item() * len(ids)"), ("count += 1", "count += len(ids)")), "You weighted the loss of each batch"),
    ("the last loss", validate(("total +=", "total =")), "What do you divide the sum of these losses by"),
    ("needs the number of batches", validate(("    return total / count", "    return total / len(batches)")), "average_loss(model, 7 batches)"),
    ("a list of all batches", validate(("    with torch", "    batches = list(batches)\n    with torch")), "holds on to all the batches"),
    ("a list of numbers", validate(("return total / count", "return [total / count]")), "Your function should return a single number"),
    ("looks at one batch only", validate(("            count += 1", "            count += 1\n            break")), "What do you divide the sum of these losses by"),
]  # fmt: skip

SEARCH = """
def smallest_layout(config, gpu_bytes, largest_tp=8):
    layouts = [
        Layout(tp=tp, pp=pp)
        for tp in range(1, largest_tp + 1) if config.num_heads % tp == 0
        for pp in range(1, config.num_layers + 1) if config.num_layers % pp == 0
    ]
    needs = {layout: bill(config, layout).total for layout in layouts}
    fitting = [layout for layout in layouts if needs[layout] <= gpu_bytes]
    if not fitting:
        raise ValueError(f"even the best layout needs {min(needs.values())} bytes on a GPU with {gpu_bytes}")
    return min(fitting, key=lambda layout: (layout.gpus, layout.tp))
"""


def search(*pairs: tuple[str, str]) -> str:
    return swap_all(SEARCH, *pairs)


LAYOUTS = [
    ("looks at the first stage only", search(("bill(config, layout)", "bill(config, layout, stage=0)")), "Which stage needs the most"),
    ("looks at the last stage only", search(("bill(config, layout)", "bill(config, layout, stage=layout.pp - 1)")), "Which stage needs the most"),
    ("the largest tp among equals", search(("(layout.gpus, layout.tp)", "(layout.gpus, -layout.tp)")), "which layout does the exercise ask for"),
    ("the smallest tp, whatever it takes", search(("(layout.gpus, layout.tp)", "(layout.tp, layout.gpus)")), "Did you try every layout"),
    ("the smallest pipeline, whatever it takes", search(("(layout.gpus, layout.tp)", "(layout.pp, layout.gpus)")), "Did you try every layout"),
    ("no pipelines", search(("range(1, config.num_layers + 1)", "(1,)")), "What does your search do when it reaches"),
    ("no tensor parallelism", search(("range(1, largest_tp + 1)", "(1,)")), "What does your search do when it reaches"),
    ("powers of two", search(("range(1, largest_tp + 1)", "(1, 2, 4, 8)")), "What does your search do when it reaches"),
    ("splits heads", search((" if config.num_heads % tp == 0", "")), "each rank takes whole heads"),
    ("uneven stages", search((" if config.num_layers % pp == 0", "")), "Every stage should have the same number of layers"),
    ("less than, not at most", search(("<= gpu_bytes", "< gpu_bytes")), "What does your search do when it reaches"),
    ("at most eight stages", search(("range(1, config.num_layers + 1)", "range(1, 9)")), "What does your search do when it reaches"),
    ("stops before largest_tp", search(("range(1, largest_tp + 1)", "range(1, max(2, largest_tp))")), "What does your search do when it reaches"),
    ("always up to 8", search(("range(1, largest_tp + 1)", "range(1, 9)")), "largest_tp is only 1"),
    ("up to 4 if not told", search(("largest_tp=8", "largest_tp=4")), "What does your search do when it reaches"),
    ("forgets the activations", search((".total for layout", ".total - bill(config, layout).activations for layout")), "the most heavily loaded GPU needs"),
    ("the sum of all stages divided by pp", search(("bill(config, layout).total for", "bill(config, Layout(tp=layout.tp)).total // layout.pp for")), "the most heavily loaded GPU needs"),
    ("replicas", search(("Layout(tp=tp, pp=pp)", "Layout(tp=tp, pp=pp, dp=2)")), "Adding replicas speeds up training"),
    ("a tuple", search(("return min(fitting", "best = min(fitting")) + "    return best.tp, best.pp\n", "Your function should return a Layout"),
    ("returns None where nothing fits", search(("        raise ValueError", "        return None\n        raise ValueError")), "What should your function do if no layout fits"),
    ("returns the best where nothing fits", search(("        raise ValueError", "        return min(layouts, key=needs.get)\n        raise ValueError")), "What should your function do if no layout fits"),
    ("another error", search(("raise ValueError", "raise RuntimeError")), "What should your function do if no layout fits"),
    ("an error that does not say how much", search(("even the best layout needs {min(needs.values())} bytes on a GPU with {gpu_bytes}", "nothing fits")), "should contain the smallest gpu_bytes"),
    ("names the bytes of the most GPUs", search(("min(needs.values())", "needs[max(layouts, key=lambda layout: layout.gpus)]")), "should contain the smallest gpu_bytes"),
    ("names the bytes of a single GPU", search(("min(needs.values())", "max(needs.values())")), "should contain the smallest gpu_bytes"),
]  # fmt: skip

WRONG = [
    WrongAnswer(exercise=exercise, name=name, source=source, says=says)
    for exercise, answers in (("0.1", BYTES), ("0.2", PARAMETERS), ("0.3", LOOP), ("0.4", LAYOUTS))
    for name, source, says in answers
]
