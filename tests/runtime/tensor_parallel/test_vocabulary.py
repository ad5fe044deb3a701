"""Tables split over the vocabulary: padding, ties, sizes that do not divide, and tables that stay whole."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from atorch.runtime.tensor_parallel import whole_state
from atorch.runtime.tensor_parallel.split import tensor_parallel
from tests.pool import on_ranks
from tests.runtime.sharing import Block
from tests.runtime.tensor_parallel.models import side_by_side
from tests.runtime.tensor_parallel.test_split import mesh_of

ROWS, WIDTH, PADDING = 7, 6, 5


class Tied(nn.Module):
    """Embedding and logits on one table, with a token for padding, and a bias; a table of another size."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.tokens = nn.Embedding(ROWS, WIDTH, padding_idx=PADDING, **settings)
        self.places = nn.Embedding(ROWS + 2, WIDTH)
        self.blocks = nn.Sequential(Block(WIDTH), Block(WIDTH))
        self.logits = nn.Linear(WIDTH, ROWS)
        self.logits.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        logits: Tensor = self.logits(self.blocks(x))
        return logits


def run(model: nn.Module) -> Any:
    return model(torch.arange(ROWS)[None].repeat(2, 1))


RENORMED = [("tokens.weight", "max_norm and scale_grad_by_freq need the whole table")]


@pytest.mark.parametrize(
    ("settings", "held", "cut", "kept"),
    [({}, (4, 3), ["logits.weight", "tokens.weight"], []), ({"max_norm": 100.0}, (ROWS, ROWS), [], RENORMED)],
)
@on_ranks()
def test_a_tied_table_is_cut_once_and_one_that_is_renormed_stays_whole(
    rank: int, size: int, settings: dict[str, Any], held: tuple[int, int], cut: list[str], kept: list[tuple[str, str]]
) -> None:
    model = Tied(**settings)
    plain = copy.deepcopy(model)
    layout = tensor_parallel(model, run, mesh_of(size))
    weights = torch.arange(2.0 * ROWS * ROWS).view(2, ROWS, ROWS).sin()
    state = partial(whole_state, layout=layout)
    assert model.logits.weight is model.tokens.weight
    assert getattr(model.tokens.weight, "to_local", lambda: model.tokens.weight)().shape[0] == held[rank]
    assert sorted(name for name in layout.rows if "blocks" not in name) == cut
    assert [(each.name, each.reason) for each in layout.kept] == kept
    found = side_by_side(model, plain, lambda model, _: (run(model) * weights).mean(), state=state)
    assert found["update"] < 1e-4
