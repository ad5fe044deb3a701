"""A few tokens of a few samples: which end of a sequence, what else is cut with it, and models that refuse."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from atorch.auto.opt_lib.shared.model_requirements import SAMPLES, TOKENS, on_few_tokens, with_few_tokens

LENGTH = 20


def tokens(samples: int = 5, length: int = LENGTH) -> Tensor:
    return torch.arange(samples * length).view(samples, length)


def test_what_is_as_long_as_a_sequence_is_cut_with_it() -> None:
    short = with_few_tokens(
        {
            "input_ids": tokens(),
            "labels": tokens(),
            "mask": torch.ones(5, 1, LENGTH, LENGTH),
            "image": torch.ones(5, 3, 8, 8),
            "length": torch.full((5,), LENGTH),
            "decoder_input_ids": tokens(length=TOKENS + 2),
            "few": tokens(length=TOKENS),
            "name": "kept",
        }
    )
    assert {name: tuple(value.shape) for name, value in short.items() if name != "name"} == {
        "input_ids": (5, TOKENS),
        "labels": (5, TOKENS),
        "mask": (5, 1, TOKENS, TOKENS),
        "image": (5, 3, 8, 8),
        "length": (5,),
        "decoder_input_ids": (5, TOKENS),
        "few": (5, TOKENS),
    }
    assert torch.equal(short["input_ids"], tokens()[:, :TOKENS])
    assert short["name"] == "kept"

    features = torch.randn(5, LENGTH)
    assert with_few_tokens(features) is features


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_end_that_is_not_padding_is_taken(side: str) -> None:
    padding, ids = torch.zeros(2, LENGTH, dtype=torch.long), tokens(2) + 1
    whole = torch.cat([padding, ids] if side == "left" else [ids, padding], 1)
    attended = (whole > 0).long()
    short = with_few_tokens([whole, attended])
    assert torch.equal(short[0], ids[:, -TOKENS:] if side == "left" else ids[:, :TOKENS])
    assert bool(short[1].all())


class Counting(nn.Module):
    """Says how many tokens it was given, and takes no fewer than `least`."""

    def __init__(self, least: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.least = least

    def forward(self, ids: Tensor) -> tuple[int, ...]:
        if ids.shape[1] < self.least:
            raise ValueError(f"at least {self.least} tokens")
        return tuple(ids.shape)


@pytest.mark.parametrize(("least", "length"), [(1, TOKENS), (TOKENS + 1, LENGTH)])
def test_a_model_that_refuses_gets_whole_sequences(least: int, length: int) -> None:
    ctx: Any = SimpleNamespace(
        sample_batch=tokens(), prepare_input=lambda data, device: data, call_model=lambda model, batch: model(batch)
    )
    run, model = on_few_tokens(ctx, "tensor_parallel"), Counting(least)
    assert [run(model), run(model)] == [(SAMPLES, length)] * 2
    with pytest.raises(ValueError, match="at least 99 tokens"):
        on_few_tokens(ctx, "tensor_parallel")(Counting(99))


def test_a_batch_of_which_no_part_runs_is_taken_whole() -> None:
    """Edges name nodes that a part of them has not got."""
    batch = {"x": torch.randn(5, 4), "edges": torch.tensor([[0, 4], [4, 1], [2, 3], [3, 2], [1, 0]])}
    ctx: Any = SimpleNamespace(
        sample_batch=batch,
        prepare_input=lambda data, device: data,
        call_model=lambda model, batch: model(batch["x"])[batch["edges"]].shape,
    )
    run = on_few_tokens(ctx, "tensor_parallel")
    assert [run(nn.Linear(4, 2)), run(nn.Linear(4, 2))] == [(5, 2, 2)] * 2
