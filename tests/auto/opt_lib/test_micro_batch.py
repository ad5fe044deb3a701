"""micro_batch: sizes that the search tries, and a model that it needs a loss for."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import nn

from atorch import auto_accelerate
from atorch.auto.opt_lib.micro_batch import MicroBatch
from atorch.errors import StrategyError
from tests.auto.opt_lib.splitting import PROFILE, cluster


def test_it_needs_a_loss_and_samples_apart() -> None:
    with pytest.raises(StrategyError, match="loss_func"):
        auto_accelerate(nn.Linear(2, 2), load_strategy=["micro_batch"])

    tried = [(each.size, each.reduce) for each in MicroBatch.choices(PROFILE, cluster())]
    assert tried == [(2**power, reduce) for power in range(9) for reduce in ("once", "each")]
    together = replace(PROFILE, module_classes=frozenset({"BatchNorm1d"}))
    assert not list(MicroBatch.choices(together, cluster()))
