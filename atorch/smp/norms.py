"""Norms over all parts of a partitioned model."""

from __future__ import annotations

from torch import Tensor

from atorch.runtime.clip import Key
from atorch.runtime.spread import Spread
from atorch.smp.model import DistributedModel
from atorch.smp.session import session


def spread_of(model: DistributedModel) -> Spread:
    """What other processes have of a partitioned model: other stages, and other parts of what tensor ranks split."""
    runner, split = model.runner, model.split
    own = dict(model.named_parameters(remove_duplicate=False))
    parts: dict[Tensor, Key] = {}
    if split.group is not None:
        parts = {own[name]: (split.group,) for name in split.cuts if name in own}
    if runner is None or runner.ties is None:
        return Spread(parts=parts)
    stages = (session().mesh.group("pipeline"),)
    return Spread(over=stages, parts=parts, counted_elsewhere=runner.ties.counted_elsewhere)
