"""Only some parameters are split, and of them linear layers and tables by themselves where nothing else takes them."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch import nn

from atorch.runtime.tensor_parallel import apply_layout, tensor_parallel, whole_state
from tests.pool import on_ranks
from tests.runtime.sharing import Block
from tests.runtime.tensor_parallel.models import batch, llama, side_by_side
from tests.runtime.tensor_parallel.test_split import mesh_of

IDS = torch.tensor([[0, 5, 9, 12], [7, 6, 1, 9]])


def stack() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(13, 8, padding_idx=9), Block(8), Block(8), nn.Linear(8, 5))


def names(model: nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if "norm" not in name]


def split(rank: int, size: int, among: list[str] | None) -> dict[str, Any]:
    model, plain, again, mesh = stack(), stack(), stack(), mesh_of(size)
    layout = tensor_parallel(model, lambda model: model(IDS), mesh, among=among, as_dtensors=False)
    apply_layout(again, layout, mesh, as_dtensors=False)
    same = all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    state = partial(whole_state, layout=layout, group=mesh.get_group())
    return {
        "kept": [each.name for each in layout.kept],
        "rows": set(layout.rows),
        "alone": {*layout.alone.lookups, *layout.alone.logits},
        "same": same,
        **side_by_side(model, plain, lambda model, _: model(IDS).tanh().pow(2).sum(), state=state, lr=0.1, steps=1),
    }


@on_ranks()
def test_what_is_named_is_split_alone_and_heads_need_not_be_divided(rank: int, size: int) -> None:
    every, half, free = [split(rank, size, among) for among in (names(stack()), ["1.up.weight", "1.up.bias"], None)]
    assert not every["kept"]
    assert every["alone"] == {"0.weight", "3.weight"}
    assert {"1.up.weight", "1.up.bias", "1.down.weight", "2.down.weight"} < every["rows"]
    assert not half["kept"]
    assert half["rows"] == half["alone"] == {"1.up.weight"}
    assert not free["alone"]
    assert "3.weight" in free["kept"]
    assert all(each["update"] <= 1e-5 and each["same"] for each in (every, half, free))
    torch.manual_seed(0)
    model = llama(heads=3, kv_heads=3)
    plain = copy.deepcopy(model)
    among = [name for name, _ in model.named_parameters()]
    layout = tensor_parallel(model, lambda model: model(**batch("llama")), mesh_of(size), among=among)
    error = model(**batch("llama")).logits - plain(**batch("llama")).logits
    assert {name.split(".")[-2] for name in layout.alone.logits} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert float(error.norm()) <= 1e-4
