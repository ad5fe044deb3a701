"""Only some parameters are split, and of them linear layers and tables by themselves where nothing else takes them."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from atorch.runtime.tensor_parallel import ModelLayout, apply_layout, tensor_parallel, whole_state
from tests.pool import Pool
from tests.runtime.tensor_parallel.models import batch, llama


class Block(nn.Module):
    """A pair that can be split together, in a model that repeats it."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(F.gelu(self.up(x)))
        return result


def stack() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(13, 8, padding_idx=9), Block(), Block(), nn.Linear(8, 5))


IDS = torch.tensor([[0, 5, 9, 12], [7, 6, 1, 9]])


def split(rank: int, size: int, among: list[str] | None) -> tuple[dict[str, str], list[str], list[str], float, float]:
    model, plain = stack(), stack()
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tensor",))
    layout = tensor_parallel(model, lambda model: model(IDS), mesh, among=among, as_dtensors=False)
    again = stack()
    apply_layout(again, layout, mesh, as_dtensors=False)
    same = all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    for each in (model, plain):
        each(IDS).tanh().pow(2).sum().backward()
        torch.optim.SGD(each.parameters(), lr=0.1).step()
    whole, expected, before = whole_state(model, layout, mesh.get_group()), plain.state_dict(), stack().state_dict()
    error = torch.stack([(whole[name] - expected[name]).norm() for name in expected]).norm()
    moved = torch.stack([(before[name] - expected[name]).norm() for name in expected]).norm()
    kept = {each.name: each.reason for each in layout.kept}
    alone = sorted((*layout.alone.lookups, *layout.alone.logits))
    return kept, sorted(layout.rows), alone, float(error / moved), float(not same)


def names(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters()]


def test_all_that_is_named_is_split(pool: Pool) -> None:
    for kept, rows, alone, error, differs in pool.run(split, names(stack())):
        assert not kept
        assert alone == ["0.weight", "3.weight"]
        assert {"1.up.weight", "1.up.bias", "1.down.weight", "2.down.weight"} < set(rows)
        assert error <= 1e-5
        assert not differs


def test_half_of_a_pair_is_split_by_itself(pool: Pool) -> None:
    for kept, rows, alone, error, differs in pool.run(split, ["1.up.weight", "1.up.bias"]):
        assert not kept
        assert rows == alone == ["1.up.weight"]
        assert error <= 1e-5
        assert not differs


def test_nothing_is_split_by_itself_unless_it_is_named(pool: Pool) -> None:
    for kept, rows, alone, error, _ in pool.run(split, None):
        assert not alone
        assert "3.weight" in kept
        assert "3.weight" not in rows
        assert error <= 1e-5


def heads(rank: int, size: int) -> tuple[list[str], Any]:
    torch.manual_seed(0)
    model = llama(heads=3, kv_heads=3)
    plain = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tensor",))
    layout: ModelLayout = tensor_parallel(model, lambda model: model(**batch("llama")), mesh, among=names(model))
    error = model(**batch("llama")).logits - plain(**batch("llama")).logits
    return sorted(layout.alone.logits), float(error.norm())


def test_heads_that_the_ranks_do_not_divide_are_no_error(pool: Pool) -> None:
    for alone, error in pool.run(heads):
        assert {name.split(".")[-2] for name in alone} == {"q_proj", "k_proj", "v_proj", "o_proj"}
        assert error <= 1e-4
