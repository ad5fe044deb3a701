"""Leaves of nested data: in order, by place, and in containers of the same classes."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from atorch.model.pytree import leaves_of, map_tensors, tensors_in


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass
class Held:
    value: Any


ONE, TWO = torch.ones(1), torch.full((2,), 2.0)
DATA = {"a": [ONE, "word"], "b": Pair(Held(TWO), ["x", "y"])}


def test_leaves_come_in_order_with_their_places() -> None:
    places = [place for place, _ in leaves_of(DATA, "data")]
    assert places == ["data['a'][0]", "data['a'][1]", "data['b'][0].value", "data['b'][1]"]
    assert [id(each) for each in tensors_in(DATA)] == [id(ONE), id(TWO)]


def test_tensors_alone_are_changed_in_copies_of_their_containers() -> None:
    doubled = map_tensors(lambda tensor: tensor * 2, DATA)
    assert isinstance(doubled["b"], Pair)
    assert isinstance(doubled["b"].first, Held)
    assert (doubled["a"][0].item(), doubled["b"].first.value.tolist()) == (2.0, [4.0, 4.0])
    assert (doubled["a"][1], doubled["b"].second) == ("word", ["x", "y"])
    assert DATA["b"].first.value is TWO  # type: ignore[union-attr]


def test_a_leaf_alone() -> None:
    assert leaves_of(3) == [("batch", 3)]
    assert map_tensors(Tensor.sum, TWO).item() == 4.0
