"""The checks of chapter 00: optimizer state (0.1), parameters (0.2), validation (0.3) and the fewest GPUs (0.4)."""

import re
import weakref
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tplab.course.checks.cases import random_tensor
from tplab.course.checks.forms.alone import Alone, Call, one
from tplab.course.checks.observation import Claim, Observed, Seen, Snapshot
from tplab.course.checks.trials import exercise
from tplab.memory.config import PRESETS, GPTConfig
from tplab.memory.memory_bill import GPUS, Layout, bill
from tplab.memory.meter import MemoryMeter
from tplab.memory.small_gpt import GPT


def pick(generator: torch.Generator, low: int, high: int) -> int:
    return int(torch.randint(low, high + 1, (), generator=generator))


def spelled(config: GPTConfig) -> str:
    """Return a configuration as the call that creates it, with its sizes and all options that differ from GPT-2's."""
    sizes = ("num_layers", "hidden_size", "num_heads", "vocab_size", "seq_length", "num_kv_heads", "ffn_hidden_size")
    parts = [f"{name}={value}" for name in sizes if (value := getattr(config, name)) is not None]
    parts += ["gated=True"] * config.gated
    parts += [f"{name}=False" for name in ("bias", "learned_positions", "tied_embedding") if not getattr(config, name)]
    return f"GPTConfig({', '.join(parts)})"


# 0.1: bytes of weights, gradients and optimizer state

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
}
BYTES = {"weights": "bytes of weights", "gradients": "bytes of gradients", "optimizer": "bytes of the optimizer state"}
LARGE = 418_541, 418_549  # a matrix with more elements than float32 can count exactly


class Matrix(NamedTuple):
    shape: tuple[int, int]
    optimizer: str
    mixed: bool

    def __str__(self) -> str:
        return f'state_bytes({self.shape}, "{self.optimizer}", mixed_precision={self.mixed})'


def matrices(generator: torch.Generator) -> Iterator[Matrix]:
    for mixed, optimizer in product((False, True), OPTIMIZERS):
        small = pick(generator, 3, 40), pick(generator, 41, 80)
        for shape in (small, small[::-1], LARGE):
            yield Matrix(shape, optimizer, mixed)


def run_state(state_bytes: Callable[..., Any], call: Call) -> Seen:
    said = state_bytes(*call.given)
    if not isinstance(said, Mapping) or set(said) != set(BYTES):
        got = f"a dict with the keys {', '.join(map(str, said))}" if isinstance(said, Mapping) else type(said).__name__
        return one({f"it returns a dict with the keys {', '.join(BYTES)}": Claim(f"it returned {got}")})
    return one({name: said[part] for part, name in BYTES.items()})


def run_all(state_bytes: Callable[..., Any], call: Call) -> Seen:
    returned = [(matrix, said, dict(said)) for matrix in call.given for said in [state_bytes(*matrix)]]
    changed = [str(matrix) for matrix, said, before in returned if dict(said) != before]
    return one(
        {"later calls don't change earlier results": Claim(f"{changed[0]} returned one that did" if changed else "")}
    )


def right_state(call: Call) -> Seen:
    sizes = counted(call.given) if call.given.shape == LARGE else measured(call.given)
    return one(dict(zip(BYTES.values(), sizes, strict=True)))


def measured(matrix: Matrix) -> tuple[int, int, int]:
    """Train a matrix for a real step, and return the bytes of its weights, its gradients and the optimizer's state.

    The optimizer's step counter isn't included.
    """
    weight = torch.zeros(matrix.shape, dtype=torch.bfloat16 if matrix.mixed else torch.float32, requires_grad=True)
    (gradient,) = torch.autograd.grad(weight.sum(), weight)
    trained = weight.detach().float().requires_grad_()  # a copy only in mixed precision
    trained.grad = gradient.float()
    optimizer = OPTIMIZERS[matrix.optimizer]([trained])
    optimizer.step()
    kept = [value for value in optimizer.state[trained].values() if isinstance(value, Tensor) and value.dim()]
    kept += [trained] * matrix.mixed
    return weight.nbytes, gradient.nbytes, sum(value.nbytes for value in kept)


def counted(matrix: Matrix) -> tuple[int, int, int]:
    """Return the same for a matrix that's too large to train."""
    rows, columns = matrix.shape
    n = rows * columns
    kept = {"sgd": 0, "momentum": n, "adam": 2 * n, "amsgrad": 3 * n, "adafactor": rows + columns}[matrix.optimizer]
    return (2 * n, 2 * n, 4 * n + 4 * kept) if matrix.mixed else (4 * n, 4 * n, 4 * kept)


exercise(
    "0.1", "What an optimizer has to remember", takes=["state_bytes"],
    trials=[
        Alone(
            calls=lambda generator: [Call(matrix, str(matrix)) for matrix in matrices(generator)],
            run=run_state, right=right_state,
        ),
        Alone(
            calls=lambda generator: [Call(list(matrices(generator)), "state_bytes called many times")],
            run=run_all, right=lambda call: [{}],
        ),
    ],
    passed="Your results match the actual tensor sizes after a step of torch.optim, down to the byte.",
)  # fmt: skip

# 0.2: the number of parameters

# Two mistakes shouldn't give the same number by chance. So these are large primes V and S: no part of the layers has as
# many vectors of h elements as an embedding table. With 3 or 5 layers, the tables and the final norm together don't
# have as many either, because V + 2 is a multiple of 15, and S + 2 isn't a multiple of 3 or 5
VOCABULARIES = (163, 193, 223, 283, 313, 373, 433, 463)
LENGTHS = (89, 101, 107, 131, 137, 149, 167, 179)
LLAMA: dict[str, bool] = {"gated": True, "bias": False, "tied_embedding": False, "learned_positions": False}


def configs(generator: torch.Generator) -> Iterator[GPTConfig]:
    """Yield the configurations to count.

    The first configuration has GPT-2's options, the next ones each change one of these options, and another one has
    Llama's options. They're followed by random mixtures of the two, and finally by GPT-3.
    """

    def config(fewer_heads: bool = False, other_ffn: bool = False, **flags: bool) -> GPTConfig:
        keys = pick(generator, 2, 4)
        heads = keys * pick(generator, 2, 3)
        h = heads * pick(generator, 3, 6)
        return GPTConfig(
            num_layers=3 + 2 * pick(generator, 0, 1),  # 3 or 5, because 2 or 4 could also be the bytes per element
            hidden_size=h,
            num_heads=heads,
            vocab_size=VOCABULARIES[pick(generator, 0, 7)],
            seq_length=LENGTHS[pick(generator, 0, 7)],
            num_kv_heads=keys if fewer_heads else None,
            ffn_hidden_size=2 * h + pick(generator, 1, h) if other_ffn else None,
            **flags,  # type: ignore[arg-type]
        )

    yield config()
    yield from (config(**{name: value}) for name, value in LLAMA.items())
    yield config(fewer_heads=True)
    yield config(other_ffn=True)
    yield config(fewer_heads=True, other_ffn=True, **LLAMA)
    for _ in range(12):
        yield config(**{name: bool(pick(generator, 0, 1)) for name in (*LLAMA, "fewer_heads", "other_ffn")})
    yield GPTConfig(num_layers=96, hidden_size=12288, num_heads=96, vocab_size=50257, seq_length=2048)  # GPT-3


def weights(config: GPTConfig) -> dict[str, Tensor]:
    """Return a model's parameters by name, on device "meta", where tensors have shapes but no memory."""
    with torch.device("meta"):
        return dict(GPT(config).named_parameters())


def listed(config: GPTConfig) -> str:
    """List the model's weights with their shapes, mentioning identical layers only once."""
    lines = []
    for name, parameter in weights(config).items():
        if name.startswith("layers.0.") or not name.startswith("layers."):
            times = f" in each of {config.num_layers} layers" if name.startswith("layers.") else ""
            lines.append(f"{name.removeprefix('layers.0.'):<22} {list(parameter.shape)}{times}")
    return "\n".join(lines)


exercise(
    "0.2", "Count the parameters of a GPT", takes=["parameter_count"],
    trials=[
        Alone(
            calls=lambda generator: (
                Call(config, f"parameter_count({spelled(config)})", shows=listed(config))
                for config in configs(generator)
            ),
            run=lambda parameter_count, call: one({"the number of parameters": parameter_count(call.given)}),
            right=lambda call: one({"the number of parameters": sum(p.numel() for p in weights(call.given).values())}),
        )
    ],
    passed="Your counts match the actual PyTorch modules for GPT-2, for Llama, and for random mixtures of the two.",
)  # fmt: skip

# 0.3: a validation loop to fix

WIDTH, ROWS = 64, 32
ACTIVATIONS = 4 * ROWS * WIDTH * 8  # bytes that the backward pass of one batch needs
SPARE = 4096  # bytes that the answer may use for small tensors, such as the losses of all batches
HELD = 3  # how many earlier batches may still be in memory: the previous one, and two more if the loop reads ahead


class Model(nn.Sequential):
    """A stack of layers that returns the mean loss, as a GPT does.

    Its activations are easy to tell apart from its weights.
    """

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:  # type: ignore[override]
        return (super().forward(x) - targets).square().mean()


class Validation(NamedTuple):
    model: Model
    batches: list[tuple[Tensor, Tensor]]
    loads: bool = False  # whether the batches come from a generator, which loads one at a time

    def losses(self) -> list[float]:
        with torch.no_grad():
            return [self.model(*batch).item() for batch in self.batches]


def validations(generator: torch.Generator) -> Iterator[Call]:
    """Yield loops over 7, 1 and 2 batches, because many batches show best what stays in memory.

    The last batch is smaller than the others, as it is in most data sets.
    """
    for number in (7, 1, 2):
        model = Model(*(layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh()))).train(number != 2)
        for parameter in model.parameters():
            parameter.data = random_tensor(generator, *parameter.shape) / WIDTH**0.5
        sizes = [(rows, WIDTH) for rows in [ROWS] * (number - 1) + [ROWS // 4]]
        batches = [(random_tensor(generator, *size), random_tensor(generator, *size)) for size in sizes]
        note = f"average_loss(model, {number} batch{'es' * (number > 1)})"
        yield Call(Validation(model, batches, loads=number == 7), note)


def handed_over(data: list[tuple[Tensor, Tensor]], held: list[int]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batches without keeping any of them in memory.

    Before it yields a batch, this generator appends to `held` how many of the earlier batches are still in memory.
    """
    earlier: list[weakref.ref[torch.UntypedStorage]] = []
    while data:
        held.append(sum(batch() is not None for batch in earlier))
        earlier.append(weakref.ref(data[0][0].untyped_storage()))
        yield data.pop(0)


def run_validation(average_loss: Callable[..., Any], call: Call) -> Seen:
    model, batches, loads = call.given
    with MemoryMeter() as least:
        call.given.losses()
    training, parameters = model.training, dict(model.named_parameters())
    before, held = Snapshot(**parameters), list[int]()
    with MemoryMeter() as meter, torch.enable_grad():
        loss = average_loss(model, handed_over(batches, held) if loads else batches)
        is_on = torch.is_grad_enabled()
    extra, earlier = meter.peak - least.peak, max(held, default=0)
    replaced = [name for name, parameter in model.named_parameters() if parameters.get(name) is not parameter]
    filled = [f"the gradient of {name}" for name, parameter in parameters.items() if parameter.grad is not None]
    changed = [*before.changed(), *replaced, *filled]
    has_graph = isinstance(loss, Tensor) and loss.requires_grad
    size = f"{extra:,} bytes more than necessary"
    return one({
        "the average loss": loss.item() if isinstance(loss, Tensor) and loss.numel() == 1 else loss,
        "the result has no autograd graph": Claim("it has one" if has_graph else ""),
        "the model's parameters don't change": Claim(f"your function changes {changed[0]}" if changed else ""),
        "model.training doesn't change": Claim(f"it was {training}" if model.training != training else ""),
        "autograd is still on afterward": Claim("" if is_on else "it's off"),
        "it never needs the memory of two batches": Claim(size if extra > 1.5 * ACTIVATIONS else ""),
        "nothing is kept for a backward pass": Claim(size if extra > SPARE else ""),
        "earlier batches are freed": Claim(f"{earlier} of them were still in memory" if earlier > HELD else ""),
    })  # fmt: skip


exercise(
    "0.3", "Fix a validation loop", takes=["average_loss"],
    trials=[
        Alone(
            calls=validations, run=run_validation, tol=1e-5,  # because the sum may be a float32 tensor
            right=lambda call: one({"the average loss": sum(call.given.losses()) / len(call.given.batches)}),
        )
    ],
    passed="Your function doesn't keep any activations in memory, no matter how many batches there are.",
)  # fmt: skip

# 0.4: the layout with the fewest GPUs

MOST = 8  # number of GPUs in a machine, and the default of largest_tp


class Search(NamedTuple):
    config: GPTConfig
    capacity: int
    largest: int | None  # None for the default of largest_tp
    needs: dict[tuple[int, int], int]  # for every (tp, pp) that's allowed, the bytes of the most heavily loaded GPU

    def best(self) -> tuple[int, int] | None:
        """Return the (tp, pp) with the fewest GPUs, and among these the one with the smallest tp, or None."""
        fitting = [layout for layout, size in self.needs.items() if size <= self.capacity]
        return min(fitting, key=lambda layout: (layout[0] * layout[1], layout[0]), default=None)

    def call(self) -> Call:
        limit = "" if self.largest is None else f", largest_tp={self.largest}"
        shows = f"Every layout needs at least {min(self.needs.values()):,} bytes."
        if best := self.best():
            shows = "The best layout is Layout(tp={}, pp={}).".format(*best)
        return Call(self, f"smallest_layout({spelled(self.config)}, gpu_bytes={self.capacity}{limit})", shows=shows)


def allowed(config: GPTConfig, largest: int) -> dict[tuple[int, int], int]:
    return {
        (tp, pp): max(bill(config, Layout(tp=tp, pp=pp), stage=stage).total for stage in range(pp))
        for tp in range(1, largest + 1) if config.num_heads % tp == 0
        for pp in range(1, config.num_layers + 1) if config.num_layers % pp == 0
    }  # fmt: skip


def searches(generator: torch.Generator) -> Iterator[Call]:
    """Yield searches with every capacity at which the result changes, and with one byte less."""
    layers, tokens = (6, 8, 10, 14, 15)[pick(generator, 0, 4)], pick(generator, 40, 4000)  # always four divisors
    for config in (
        GPTConfig(num_layers=12, hidden_size=96, num_heads=12, vocab_size=500, seq_length=64),
        GPTConfig(num_layers=layers, hidden_size=50, num_heads=5, vocab_size=tokens, seq_length=32),
        # The last stage needs the most memory
        GPTConfig(num_layers=4, hidden_size=48, num_heads=6, vocab_size=tokens + 6000, seq_length=16),
        # Each GPU needs the least memory with pp = 4
        GPTConfig(num_layers=8, hidden_size=64, num_heads=1, vocab_size=50, seq_length=4096),
    ):
        for largest in (MOST, 1, 4):
            needs = allowed(config, largest)
            sizes = sorted(needs.values()) if largest == MOST else [min(needs.values())]
            for capacity in (*sizes, *(size - 1 for size in sizes[1:]), 2 * sizes[-1], sizes[0] - 1):
                yield Search(config, capacity, largest, needs).call()
    for name in ("GPT-2 1.5B", "GPT-3 175B", "Llama 3 70B"):
        yield Search(PRESETS[name], GPUS["H100, 80 GB"], None, allowed(PRESETS[name], MOST)).call()


def run_search(smallest_layout: Callable[..., Any], call: Call) -> Seen:
    search = call.given
    options = {} if search.largest is None else {"largest_tp": search.largest}
    try:
        said = smallest_layout(search.config, search.capacity, **options)
    except Exception as error:
        if search.best() and not isinstance(error, ValueError):
            raise
        said = error
    if not search.best():
        return one(refusal(said, min(search.needs.values())))
    if isinstance(said, ValueError):
        return one({"it finds a layout that fits": Claim(f"it raised ValueError: {said}")})
    if not isinstance(said, Layout):
        return one({"it returns a Layout": Claim(f"it returned {said!r:.80}")})
    sizes = {"tp": said.tp, "pp": said.pp, "dp": said.dp, "micro_batch": said.micro_batch}
    return one(sizes | {says: Claim(why) for says, why in flaw(said, search).items()})


def refusal(said: Any, least: int) -> Observed:
    """Return what's observed if no layout fits. The message may contain thousands separators."""
    is_error, text = isinstance(said, ValueError), re.sub(r"(?<=\d)[,_' ](?=\d{3})", "", str(said))
    is_named = not is_error or str(least) in re.findall(r"\d+", text)
    return {
        "it raises ValueError if no layout fits": Claim("" if is_error else f"the result is {said!r:.80}"),
        "the message names the smallest gpu_bytes": Claim("" if is_named else f"{least:,} isn't in {text!r:.120}"),
    }


def right_search(call: Call) -> Seen:
    best = call.given.best()
    return one({"tp": best[0], "pp": best[1], "dp": 1, "micro_batch": 1} if best else {})


def flaw(said: Layout, search: Search) -> dict[str, str]:
    """Return the first statement that isn't true of a layout, and why."""
    heads, layers, limit = search.config.num_heads, search.config.num_layers, search.largest or MOST
    if heads % said.tp:
        return {"tp divides the number of heads": f"there are {heads} heads"}
    if layers % said.pp:
        return {"pp divides the number of layers": f"there are {layers} layers"}
    if said.tp > limit:
        return {"tp is at most largest_tp": f"largest_tp is only {limit}"}
    if (size := search.needs[said.tp, said.pp]) > search.capacity:
        return {"every GPU has enough memory": f"one needs {size:,} bytes, but it has only {search.capacity:,}"}
    best = search.best() or (0, 0)
    if said.tp * said.pp > best[0] * best[1]:
        return {"no layout needs fewer GPUs": f"{best[0] * best[1]} GPUs are enough, but it takes {said.gpus}"}
    return {"the smallest tp wins a tie": f"tp={best[0]} needs as many GPUs"} if said.tp > best[0] else {}


exercise(
    "0.4", "The fewest GPUs for a model", takes=["smallest_layout"],
    trials=[Alone(calls=searches, run=run_search, right=right_search)],
    passed="Your function finds the layout with the fewest GPUs, and it breaks ties in favor of the smallest tp.",
)  # fmt: skip
