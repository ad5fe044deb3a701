"""Blocks are compiled in place, each class once."""

import copy

import pytest
import torch
from torch import nn

from atorch.model.structure import repeated_blocks
from atorch.runtime.precision.amp import autocast_forward

# The compiler looks at tensors inside the graph, and torch's own filter of this warning loses to ours.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return torch.tanh(self.inner(x))


def make_net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 4), Block(), Block(), Block())


@pytest.fixture(autouse=True)
def _fresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compiled(net, modules=None, **knobs):
    """The net, compiled by a backend that counts its graphs."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    for module in modules or repeated_blocks(net).values():
        module.compile(backend=backend, **knobs)
    return graphs


def test_blocks_of_one_class_are_compiled_once_and_compute_the_same():
    net, plain = make_net(), make_net()
    names = list(net.state_dict())
    graphs = compiled(net)
    x = torch.randn(2, 4)
    net(x).sum().backward()
    plain(x).sum().backward()
    assert len(graphs) == 1
    assert list(net.state_dict()) == names
    assert [type(module) for module in net] == [nn.Linear, Block, Block, Block]
    for mine, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_a_whole_model_with_autocast():
    net = make_net()
    autocast_forward(net, "cpu", torch.bfloat16)
    expected = net(torch.ones(2, 4))
    graphs = compiled(net, [net], fullgraph=True)
    output = net(torch.ones(2, 4))
    assert len(graphs) == 1
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output, expected)


def test_knobs_reach_torch():
    class Breaks(nn.Module):
        def forward(self, x):
            torch._dynamo.graph_break()
            return x + 1

    module = Breaks()
    compiled(module, [module], fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        module(torch.ones(2))


def test_a_copy_is_not_compiled_but_computes_the_same():
    net = make_net()
    graphs = compiled(net)
    x = torch.randn(2, 4)
    expected = copy.deepcopy(net)(x)
    assert not graphs
    torch.testing.assert_close(net(x), expected)
    assert graphs
