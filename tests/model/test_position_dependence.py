"""What a module makes by itself is told by its shapes: of fewer tokens it is shorter."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from atorch.model.structure import made_alone


class Added(nn.Module):
    """Looks tokens up, and adds something for each place."""

    def __init__(self, positions: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.tokens, self.positions, self.norm = nn.Embedding(50, 4), positions, nn.LayerNorm(4)

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.norm(self.tokens(ids))
        return x * self.norm.weight.square() + self.positions(ids)


TABLE, NUMBERS = nn.Embedding(16, 4), torch.arange(16)
WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "a slice of a table": lambda ids: TABLE.weight[: ids.shape[1]],
    "numbers that are kept": lambda ids: TABLE(NUMBERS[: ids.shape[1]]),
    "numbers that are made": lambda ids: TABLE(torch.arange(ids.shape[1], device=ids.device)),
    "nothing": lambda ids: torch.zeros_like(ids).unsqueeze(-1),
    "one for all": lambda ids: TABLE.weight[0],
}


@pytest.mark.parametrize("way", WAYS)
def test_what_is_as_long_as_the_tokens_is_seen(way: str) -> None:
    model, whole, few = Added(WAYS[way]), torch.zeros(2, 8, dtype=torch.int64), torch.zeros(2, 4, dtype=torch.int64)
    with torch.no_grad():
        result, of_whole = made_alone(lambda: model(whole), [whole])
        _, of_few = made_alone(lambda: model(few), [few])
    assert result.shape == (2, 8, 4)
    assert (of_whole == of_few) == (way in ("nothing", "one for all"))
