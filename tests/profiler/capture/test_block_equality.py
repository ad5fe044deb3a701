"""Equal blocks are told from those that differ in anything but an index."""

from functools import partial

import pytest
from torch import nn

from atorch.profiler.repeated_blocks import groups_of_alike


class Block(nn.Module):
    def __init__(self, index=0, size=4, **attributes):
        super().__init__()
        self.index, self.linear, self.norm = index, nn.Linear(size, size), nn.LayerNorm(size)
        vars(self).update(attributes)


def groups(*blocks):
    return groups_of_alike({f"blocks.{index}": block for index, block in enumerate(blocks)})


ALL = [["blocks.0", "blocks.1", "blocks.2"]]
APART = [["blocks.0", "blocks.2"], ["blocks.1"]]


class Config:
    def __init__(self, **values):
        vars(self).update(values)


def test_equal_blocks_are_found():
    assert groups(*(Block(index) for index in range(3))) == ALL
    assert groups(*(Block(index + 7) for index in range(3))) == ALL  # from anywhere
    assert groups(Block(0), Block(5), Block(2)) == APART

    assert groups(*(Block(config=Config(width=4.0, names=["a"])) for _ in range(3))) == ALL

    blocks = [Block() for _ in range(3)]
    for block in blocks:
        vars(block)["myself"] = [block]
    assert groups(*blocks) == ALL


@pytest.mark.parametrize(
    "values",
    [
        ("a", "b"), (0.1, 0.2), (True, False), (None, 1), ([1, 5], [1, 9]), ({"a": 1.0}, {"b": 1.0}), ({1}, {2}),
        (Config(kind="full"), Config(kind="sliding")), (partial(max, 1.0), partial(max, 2.0)), (len, max), (int, str),
    ],
)  # fmt: skip
def test_attributes_tell_blocks_apart(values):
    one, other = values
    assert groups(Block(kind=one), Block(kind=other), Block(kind=one)) == APART
    assert groups(Block(kind=one), Block(kind=one), Block(kind=one)) == ALL


def test_parameters_parts_and_hooks_tell_blocks_apart():
    assert groups(Block(), Block(size=8), Block()) == APART
    frozen = Block()
    frozen.linear.weight.requires_grad_(False)
    assert groups(Block(), frozen, Block()) == APART
    assert groups(Block(), Block().eval(), Block()) == APART
    assert groups(Block(), Block().half(), Block()) == APART

    other = Block()
    other.norm = nn.RMSNorm(4)
    assert groups(Block(), other, Block()) == APART
    hooked = Block()
    hooked.linear.register_forward_hook(lambda *args: None)
    assert groups(Block(), hooked, Block()) == APART
