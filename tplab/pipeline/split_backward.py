"""Chapter 13: a backward pass in two halves, for zero-bubble schedules.

The backward of Y = X A takes two matmuls: dX = dY A^T, which the previous stage is waiting for, and dA = X^T dY, which
isn't urgent. In a stage with many layers, the dX matmuls form a main path from the stage's output to its input. The dA
matmuls are on side branches, each of which ends at a parameter:

    dY --> node --> node --> node --> dX        I: follow the main path, and save the gradients at each crossing
             |                 |
            dA_2              dA_1              W: later, run only the side branches from each crossing

torch computes only the gradients needed for the inputs passed to `torch.autograd.grad`, so neither half repeats the
other's work. There are two exceptions. If the path and a side branch meet in a Python autograd.Function, its entire
backward runs in both halves. `async_grad_allreduce` uses such a function, so its all-reduce runs twice. And if a weight
is used at two crossings, W has to follow the main path once more to reach it. (torch.distributed.pipelining splits
backward in the same way: stage_backward_input, stage_backward_weight.)
"""

from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Weights = Callable[[], None]  # runs W, which adds to the gradients of the parameters


def backward_of_input(y: GradientEdge, dy: Tensor | None, x: Tensor | None) -> tuple[Tensor | None, Weights]:
    """Run I. Return the gradient of the stage's input x, and a function that runs W.

    y     the gradient edge of the stage's output (`get_gradient_edge`)
    dy    the gradient of the stage's output, or None if the output is a loss
    x     the stage's input; None for the first stage, whose input has no gradient, so W runs the entire backward

    Call the function exactly once, at any later time. The autograd graph stays alive until the function has run W and
    is deleted.
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
    """Find the nodes on the path from `top` to `bottom` that have side branches.

    Returns a dict from each node to the parameters that only this node reaches, and the parameters that several nodes
    reach.
    """
    order = _children_first(top)
    road: set[Node] = {bottom}
    for node in order:
        if any(child in road for child in _children(node)):
            road.add(node)
    below: dict[Node, dict[Tensor, None]] = {}  # the parameters that a node's side branches reach, in order
    for node in order:
        below[node] = {node.variable: None} if hasattr(node, "variable") and node not in road else {}
        for child in _children(node):
            below[node] |= below[child] if child not in road else {}
    uses = Counter(leaf for node in road for leaf in below.get(node, ()))
    crossings = {node: [leaf for leaf in below[node] if uses[leaf] == 1] for node in order if node in road}
    return {node: leaves for node, leaves in crossings.items() if leaves}, [leaf for leaf in uses if uses[leaf] > 1]


def _children_first(top: Node) -> list[Node]:
    """Return `top` and all nodes below it in post-order, so that each node follows its children."""
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
