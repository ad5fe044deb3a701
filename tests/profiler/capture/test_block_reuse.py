"""Blocks that are equal run once; whoever comes to depend on the others' runs is traced whole."""

import pytest
import torch
from torch import nn

from atorch.profiler.trace import trace
from tests.profiler.totals import total


class Block(nn.Module):
    """Counts its runs in a list that copies share."""

    runs: list[int]

    def __init__(self, index, width=4):
        super().__init__()
        self.index, self.linear = index, nn.Linear(width, width)

    def forward(self, inputs, *rest):
        self.noted(self.index)
        return inputs + self.linear(inputs)

    def noted(self, index):
        """Something that only a run does."""


class Model(nn.Module):
    def __init__(self, block=Block, number=4):
        super().__init__()
        self.first = nn.Linear(4, 4)  # so that inputs of all blocks need gradients
        self.blocks = nn.ModuleList(block(index) for index in range(number))

    def forward(self, inputs):
        inputs = self.first(inputs)
        for block in self.blocks:
            inputs = block(inputs)
        return inputs


def traced(model, inputs=None):
    batch = torch.randn(2, 4) if inputs is None else inputs
    return trace(model, batch, lambda model, x: model(x), lambda x, output: output.sum())


@pytest.fixture
def runs(monkeypatch):
    seen = []
    monkeypatch.setattr(Block, "noted", lambda self, index: seen.append(index))
    return seen


def test_equal_blocks_run_once(runs):
    profile = traced(Model())
    assert runs == [0] * 3  # in fp32, half and autocast
    assert [(each.name, each.count) for each in profile.segments] == [("start", 1), ("blocks.0", 4), ("end", 1)]


def test_inputs_of_another_shape_are_run(runs):
    class Pooling(Model):
        def forward(self, inputs):
            first, second, third, fourth = self.blocks
            return fourth(third(second(first(self.first(inputs)))[:1].clone()))

    profile = traced(Pooling())
    assert runs == [0, 0] * 3  # what is equal shares its parts
    assert [(each.name, each.count) for each in profile.blocks] == [("blocks.0", 2), ("blocks.2", 2)]
    assert total(profile, "matmul_flops") == 2 * 16 * (2 + 2 + 2 + 1 + 1)


def test_arguments_that_are_no_tensors_count(runs):
    class Told(Model):
        def forward(self, inputs):
            inputs = self.first(inputs)
            for block, told in zip(self.blocks, ("a", "b", "a", "b"), strict=True):
                inputs = block(inputs, told)
            return inputs

    traced(Told())
    assert runs == [0, 0] * 3


class Passing(Block):
    """Returns an input as it came, a view of one, and something that no gradient flows through."""

    def forward(self, state):
        inputs, table = state["inputs"], state["table"]
        with torch.no_grad():
            count = inputs.sum()
        return {"inputs": torch.relu(inputs + self.linear(inputs)), "table": table, "view": table[:1], "count": count}


def test_what_is_returned_is_like_what_the_first_returned():
    seen = []

    class Outer(Model):
        def forward(self, inputs):
            table = torch.ones(3, 4)
            state = {"inputs": self.first(inputs), "table": table, "view": table[:1], "count": inputs.sum()}
            for block in self.blocks:
                before, state = state, block(state)
                seen.append((before, state))
            return state["inputs"].add_(1)  # no leaf: it may be written to

    profile = traced(Outer(Passing))
    for before, state in seen:
        assert state["table"] is before["table"]
        assert state["view"].untyped_storage()._cdata == before["table"].untyped_storage()._cdata
        assert state["view"].shape == (1, 4)
        assert state["inputs"].requires_grad
        assert not state["count"].requires_grad
    # The first product's input, the first block's, and of every block the result of its ReLU, once.
    assert total(profile, "saved_bytes") == 4 * 8 * (2 + 4)


class Collecting(Block):
    """Leaves its loss behind."""

    def forward(self, inputs):
        self.loss = inputs.mean()
        return inputs + self.linear(inputs)


def test_what_blocks_leave_behind_makes_all_of_them_run():
    class Outer(Model):
        def forward(self, inputs):
            return super().forward(inputs).sum() + sum(block.loss for block in self.blocks)

    profile = traced(Outer(Collecting))
    assert profile.traced
    assert profile.blocks[0].num_ops == 4  # mean, a transposed weight, addmm, add
    assert sum(each.count for each in profile.blocks) == 4


def test_a_block_inside_another_is_a_part_of_it():
    class Calling(Block):
        def forward(self, inputs, inner=None):
            return inputs + self.linear(inputs if inner is None else inner(inputs))

    class Outer(Model):
        def forward(self, inputs):
            first, second, *_ = self.blocks
            return first(inputs, second)

    profile = traced(Outer(Calling))
    assert [each.name for each in profile.blocks] == ["blocks.0"]
    assert total(profile, "matmul_flops") == 2 * 2 * 2 * 16
