"""Tests if torch can split a stage's backward into gradients of inputs now and of weights later.

On its way to the inputs torch notes what arrives at each *branch*, an operation from which a weight is reached by a way
of its own, and later starts there (`stage_backward_weight`). That holds where weights have the same branches or none in
common, and where no branch is reached from another one of the same weight: the second walk would pass, and free, what
others still need. A weight that no input meets has no branch, and would get no gradient.

So a weight that is used twice, one use behind the other, or biases of positions that all blocks share, keep a stage
whole. Experts, whose branches lie side by side, do not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Users = Mapping[Node, list[Node]]
"""For each node of a graph those that backward comes from."""


def comes_apart(outputs: Iterable[Any], inputs: Iterable[Any], weights: Iterable[Any]) -> bool:
    """True if backward from `outputs` to the leaves `inputs` and `weights` comes apart, of what has gradients."""
    users = _users(_nodes(outputs))
    stem = _above(_nodes(inputs), users)
    branches = {_branches(node, users, stem) for node in _nodes(weights) if node in users}
    are_apart = len(frozenset().union(*branches)) == sum(map(len, branches))
    return all(branches) and are_apart and not any(_reach_another(each) for each in branches)


def _nodes(values: Iterable[Any]) -> list[Node]:
    """Nodes where backward begins, at tensors, or at the edges that are kept of tensors that were let go."""
    edges = (get_gradient_edge(each) if isinstance(each, Tensor) and each.requires_grad else each for each in values)
    return [edge.node for edge in edges if isinstance(edge, GradientEdge)]


def _users(roots: Iterable[Node]) -> Users:
    users: dict[Node, list[Node]] = defaultdict(list)
    for node in _walk(roots, _next):
        for other in _next(node):
            users[other].append(node)
    return users


def _above(nodes: Iterable[Node], users: Users) -> Collection[Node]:
    """The nodes, and all from which backward comes to them."""
    return _walk(nodes, lambda node: users.get(node, ()))


def _branches(weight: Node, users: Users, stem: Collection[Node]) -> frozenset[Node]:
    """Nodes where the way to a weight leaves the stem."""
    own = _walk([weight], lambda node: (other for other in users.get(node, ()) if other not in stem))
    return frozenset(other for node in own for other in users.get(node, ()) if other in stem)


def _reach_another(branches: frozenset[Node]) -> bool:
    if len(branches) == 1:
        return False
    below = _walk((other for node in branches for other in _next(node)), _next)
    return not branches.isdisjoint(below)


def _next(node: Node) -> Iterable[Node]:
    return (other for other, _ in node.next_functions if other is not None)


def _walk(starts: Iterable[Node], onwards: Any) -> set[Node]:
    """All nodes that are reached from `starts`, these among them."""
    found, waiting = set[Node](), list(starts)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting.extend(onwards(node))
    return found
