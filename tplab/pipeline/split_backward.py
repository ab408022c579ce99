"""Chapter 13: a backward in two halves, for a zero-bubble schedule.

The backward of Y = X A makes two products: dX = dY A^T, for which the stage before waits, and dA = X^T dY, for which
nobody does. In a stage of many layers the first kind forms a road from its output down to its input; the second kind
are side branches, each of which ends at a parameter:

    dY --> node --> node --> node --> dX        I: go down the road, and note at each crossing what arrives there
             |                 |
            dA_2              dA_1              W: later, from each crossing, go into its side branches only

torch makes of every product only what the inputs given to `torch.autograd.grad` need, so that no half does the other's
work. An autograd.Function of Python's is the exception: where the road and a side branch meet in one, all of its
backward runs in both halves. `async_grad_allreduce` is of that kind, with its all-reduce. A weight that is used at two
crossings is another: W reaches it by the road, and so goes down the road once more.
(torch.distributed.pipelining splits in the same way: stage_backward_input, stage_backward_weight.)
"""

from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Weights = Callable[[], None]  # W: adds to the gradients of the parameters


def backward_of_input(y: GradientEdge, dy: Tensor | None, x: Tensor | None) -> tuple[Tensor | None, Weights]:
    """I: the gradient of the stage's input x, and W, to be called once, whenever it suits.

    y     the edge of the stage's output (`get_gradient_edge`); dy its gradient, None for a loss
    x     None for the first stage, whose input has no gradient: there is no road, and W does all

    The graph lives until W has run and been dropped.
    """
    if x is None:
        return None, lambda: torch.autograd.backward(y, dy)
    crossings, shared = _crossings(y.node, get_gradient_edge(x).node)
    notes: dict[Node, Sequence[Tensor | None]] = {}
    handles = [node.register_prehook(_note(notes, node)) for node in crossings]
    (dx,) = torch.autograd.grad(y, x, dy, retain_graph=True, allow_unused=True)
    for handle in handles:
        handle.remove()

    def weights() -> None:
        if shared:
            torch.autograd.backward(y, dy, inputs=shared, retain_graph=True)
        for node, leaves in crossings.items():
            arrived = [(index, part) for index, part in enumerate(notes.pop(node, ())) if part is not None]
            if arrived:
                edges = [GradientEdge(node, index) for index, _ in arrived]
                torch.autograd.backward(edges, [part for _, part in arrived], inputs=leaves)

    return dx, weights


def _note(notes: dict[Node, Sequence[Tensor | None]], node: Node) -> Callable[[Sequence[Tensor | None]], None]:
    def hook(arrives: Sequence[Tensor | None]) -> None:
        notes[node] = tuple(arrives)

    return hook


def _crossings(top: Node, bottom: Node) -> tuple[dict[Node, list[Tensor]], list[Tensor]]:
    """The nodes on the road from `top` to `bottom` that have side branches, with the parameters that only these reach.

    And the parameters that several of them reach.
    """
    order = _children_first(top)
    road: set[Node] = {bottom}
    for node in order:
        if any(child in road for child in _children(node)):
            road.add(node)
    below: dict[Node, dict[Tensor, None]] = {}  # the parameters that a node reaches off the road, in order
    for node in order:
        below[node] = {node.variable: None} if hasattr(node, "variable") and node not in road else {}
        for child in _children(node):
            below[node] |= below[child] if child not in road else {}
    uses = Counter(leaf for node in road for leaf in below.get(node, ()))
    crossings = {node: [leaf for leaf in below[node] if uses[leaf] == 1] for node in order if node in road}
    return {node: leaves for node, leaves in crossings.items() if leaves}, [leaf for leaf in uses if uses[leaf] > 1]


def _children_first(top: Node) -> list[Node]:
    """Every node below `top`, and `top`, each behind all that stand below it."""
    order: dict[Node, None] = {}
    stack = [(top, False)]
    while stack:
        node, done = stack.pop()
        if done:
            order[node] = None
        elif node not in order:
            stack += [(node, True), *((child, False) for child in _children(node))]
    return list(order)


def _children(node: Node) -> list[Node]:
    return [child for child, _ in node.next_functions if child is not None]
