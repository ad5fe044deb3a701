"""Layouts read off gradients: what is found, and what is not taken for a split."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from atorch.runtime.tensor_parallel.derive import derive
from atorch.runtime.tensor_parallel.derive.block_sandbox import Evaluation, ForwardCall, sandboxed
from atorch.runtime.tensor_parallel.layout import BlockLayout, Rows

WIDTH, TOKENS = 8, 6


class Gated(nn.Module):
    """A fused gate, half of whose units are dead at first, with a scale for each unit; zeros as of a fresh adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Linear(WIDTH, 24)
        self.scale = nn.Parameter(torch.ones(12))
        self.down = nn.Linear(12, WIDTH)
        nn.init.zeros_(self.down.weight)
        nn.init.constant_(self.gate_up.bias, -100.0)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        out: Tensor = self.down(F.relu(gate) * up * self.scale)
        return x + out


class Normed(nn.Module):
    """A norm over the whole width between two products: no part of it depends on rows of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(WIDTH, 12), nn.LayerNorm(12), nn.Linear(12, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.up(x)))


class Experts(nn.Module):
    """Experts in one parameter, one product each; weights are used through views, transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.zeros(3, WIDTH, 12))
        self.down = nn.Parameter(torch.zeros(3, 12, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + sum((F.silu(x[i::3] @ self.up[i]) @ self.down[i]).sum() for i in range(3))


class Attention(nn.Module):
    """Six heads, one of keys and values, a norm over each head, and positions given from outside for each head."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(WIDTH, 24), nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 4)
        self.norm, self.out = nn.LayerNorm(4), nn.Linear(24, WIDTH)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        q = self.norm(self.q(x).unflatten(-1, (6, 4))).transpose(0, 1)
        k, v = self.k(x)[None], self.v(x)[None]
        weights = (q @ k.transpose(1, 2) + positions).softmax(-1)
        return self.out((weights @ v).transpose(0, 1).flatten(1))


def derived(module: nn.Module, degree: int, **more: Tensor) -> BlockLayout:
    torch.manual_seed(0)
    return derive(sandboxed(module), ForwardCall((torch.randn(TOKENS, WIDTH),), more), degree)


def runs(rows: Rows) -> Any:
    return rows.dim, [list(own) for own in rows.by_rank]


def test_exact_rows_of_a_fused_gate() -> None:
    (group,) = derived(Gated(), 2).groups
    assert (group.row, runs(group.row_part), group.row_bias) == ("down.weight", (1, [[(0, 6)], [(6, 12)]]), "down.bias")
    assert runs(group.columns["gate_up.weight"]) == (0, [[(0, 6), (12, 18)], [(6, 12), (18, 24)]])
    assert runs(group.tied["gate_up.bias"]) == (0, [[(0, 6), (12, 18)], [(6, 12), (18, 24)]])
    assert runs(group.tied["scale"]) == (0, [[(0, 6)], [(6, 12)]])
    assert group.heads == 12
    assert not group.inside
    assert not group.inputs


@pytest.mark.parametrize("samples", [1, 3])
def test_units_that_are_dead_in_one_draw_of_weights_are_met_in_another(samples: int) -> None:
    """Of 4,096 units behind a ReLU some are dead on so few samples, whatever the weights; now and then the first is."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, 4096), nn.Linear(4096, WIDTH)
            self.scale = nn.Parameter(torch.ones(4096))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.down(F.relu(self.up(x)) * self.scale)
            return x + out

    block, even = sandboxed(Scaled()), Rows.even(0, 4096, 4)
    for seed in range(8):
        torch.manual_seed(seed)
        (group,) = derive(block, ForwardCall((torch.randn(samples, WIDTH),), {}), 4).groups
        assert (group.row, group.columns) == ("down.weight", {"up.weight": even})
        assert (group.tied, group.inside) == ({"up.bias": even, "scale": even}, ())


def test_experts_are_split_inside() -> None:
    (group,) = derived(Experts(), 3).groups
    assert (group.row, runs(group.row_part)) == ("down", (1, [[(0, 4)], [(4, 8)], [(8, 12)]]))
    assert runs(group.columns["up"]) == (2, [[(0, 4)], [(4, 8)], [(8, 12)]])


def test_heads_and_what_they_share() -> None:
    (group,) = derived(Attention(), 2, positions=torch.randn(6, TOKENS, TOKENS)).groups
    assert group.heads == 6
    assert runs(group.columns["q.weight"]) == (0, [[(0, 12)], [(12, 24)]])
    assert runs(group.columns["k.weight"]) == runs(group.columns["v.weight"]) == (0, [[(0, 4)], [(0, 4)]])
    assert group.forks == (("q.weight", "k.weight", "v.weight"),)
    assert group.inside == ("norm.weight", "norm.bias")
    (positions,) = [rows for place, rows in group.inputs.items() if "positions" in place]
    assert positions is not None
    assert runs(positions) == (0, [[(0, 3)], [(3, 6)]])


@pytest.mark.parametrize(
    ("module", "degree", "name", "reason", "heads"),
    [
        (Gated(), 5, "down.weight", "5 ranks do not divide its 12 columns", 0),
        (Attention(), 4, "out.weight", "4 ranks do not divide its 6 heads", 6),
        (Normed(), 2, "down.weight", "cannot be cut", 0),
    ],
)
def test_what_cannot_be_split_has_a_reason(module: nn.Module, degree: int, name: str, reason: str, heads: int) -> None:
    more = {"positions": torch.randn(6, TOKENS, TOKENS)} if isinstance(module, Attention) else {}
    layout = derived(module, degree, **more)
    assert not layout.groups
    (kept,) = [each for each in layout.kept if each.name == name]
    assert reason in kept.reason
    assert kept.heads == heads


def test_arguments_that_have_a_graph_are_recorded() -> None:
    """A model of energies asks for gradients in its forward, whatever mode it is called in."""
    block, given = nn.Linear(WIDTH, WIDTH), torch.randn(2, WIDTH, requires_grad=True)

    def run(model: nn.Module) -> None:
        with torch.enable_grad():
            model(given * 2)

    (((argument,), _),) = Evaluation(block, {"": block}, run).calls.values()
    assert torch.equal(argument, given * 2)
    assert argument.is_leaf
