"""What cannot be cut or run as a pipeline is refused on every rank, with the model as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from atorch import auto_accelerate
from atorch.errors import StrategyError
from tests.auto.training import run_each
from tests.pool import Pool, on_ranks
from tests.runtime.pipeline.job import ROWS, WIDTH, Samples, TwiceUsed, loss_func, make_model, train
from tests.runtime.pipeline.test_pipeline import stages


class Opaque(nn.Module):
    """Returns an object of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> Any:
        return nn.Module() if hidden.shape[-1] else hidden


class Returning(TwiceUsed):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Opaque() for _ in range(2))


OWN = {"returning": Returning}


def refused(rank: int, size: int, name: str, strategy: list[Any], loss: bool) -> tuple[str, str]:
    model = OWN[name]() if name in OWN else make_model(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    classes = [type(module) for module in model.modules()]
    try:
        auto_accelerate(
            model, torch.optim.SGD, Samples("twice", 2 * ROWS), loss_func if loss else None, optim_args={"lr": 0.1},
            model_input_format="unpack_dict", dataloader_args={"batch_size": ROWS}, load_strategy=strategy,
        )  # fmt: skip
    except Exception as error:
        assert [type(module) for module in model.modules()] == classes
        after = model.state_dict()
        assert after.keys() == before.keys()
        assert all(value.equal(before[key]) for key, value in after.items())
        return type(error).__name__, str(error)
    return "", "nothing was refused"


REFUSED = [  # a model, a strategy, and what is told; the last has no loss function
    ("gpt2", stages(schedule="interleaved", interleave=4), "of 8 stages needs as many repeated blocks"),
    ("gpt2", stages(micro_batches=3), "3 micro-batches do not divide the 8 rows"),
    ("gpt2", [*stages(), ("micro_batch", {"size": 3})], "micro-batches of 3 rows do not divide the 8 rows"),
    ("gpt2", stages(split_points=["transformer.h.9"]), "'transformer.h.9', where no stage can begin"),
    ("gpt2", stages(split_points=["transformer.h.1.attn"]), "lies inside of transformer.h.1"),
    ("gpt2", stages(split_points=["transformer.h.1", "transformer.h.2"]), "2 modules, and 2 stages begin at 1"),
    ("gpt2", stages(split_points=["transformer.wte"]), "nothing before the first"),
    ("gpt2", [*stages(), ("micro_batch", {"size": 2, "reduce": "each"})], "reduce"),
    ("gpt2", [*stages(schedule="zero_bubble"), ("checkpoint", {"selective": True})], "leave selective"),
    ("returning", stages(), "layers.0 returns a Module"),
    ("gpt2", stages(), "give auto_accelerate one"),
]


def test_is_refused_before_anything_is_changed(pool: Pool) -> None:
    cases = [(name, strategy, (name, strategy, told) != REFUSED[-1]) for name, strategy, told in REFUSED]
    for of_ranks, (*_, message) in zip(run_each(pool, refused, cases), REFUSED, strict=True):
        for kind, told in of_ranks:
            assert kind == StrategyError.__name__, told
            assert message in told


@on_ranks()
def test_a_loss_that_reads_parameters_where_it_sees_one_piece_is_refused(rank: int, size: int) -> None:
    with pytest.raises(StrategyError, match=r"(?s)the loss function reads transformer\..*weight_decay"):
        train("gpt2", stages(schedule="interleaved", micro_batches=4), penalty=0.02, verify=False)
