"""What scripts read of a session beside documented names: `smp.state`, `model.get_module`, modules placed late."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import atorch.smp as smp
from atorch.errors import ArgumentError
from tests.pool import Pool
from tests.smp.job import begun
from tests.smp.test_step import Blocks, rows, said, train


def test_the_session_is_read_by_name() -> None:
    with pytest.raises(ArgumentError, match="smp.init"):
        smp.state.cfg  # noqa: B018
    with begun({"prescaled_batch": True}):
        model = Blocks()
        wrapped = smp.DistributedModel(model)
        assert (smp.state.cfg.prescaled_batch, smp.state.cfg.fp16) == (True, False)
        assert smp.state.model is wrapped
        assert smp.state.optimizer is None
        assert wrapped.get_module() is model
        assert not list(smp.state.module_manager.translate_functions)  # which transformers' save_pretrained reads
        given = torch.optim.SGD(model.parameters(), lr=0.1)
        assert smp.DistributedOptimizer(given).optimizer is given  # of which a Trainer makes its scheduler
        with pytest.raises(AttributeError, match="cfg, model, optimizer and module_manager, and no cfgs"):
            smp.state.cfgs  # noqa: B018


def placed_late(rank: int, size: int) -> Any:
    with begun({"partitions": 2, "microbatches": 2, "auto_partition": False}):
        model = smp.DistributedModel(Blocks())
        layers = model.get_module().layers
        refused = said(lambda: smp.set_partition(layers[0], 2)), said(lambda: smp.set_partition("layers", 0))
        for number, layer in enumerate(layers.children()):
            smp.set_partition(layer, int(number > 0))
        train(model, rows())
        late = said(lambda: smp.set_partition(model.get_module(), 0))
        return sorted(name for name, _ in model.local_named_parameters()), refused, late


def test_modules_that_exist_are_put_on_partitions(pool: Pool) -> None:
    first, second = pool.run(placed_late)
    assert first[0] == ["layers.0.bias", "layers.0.weight"]
    assert len(second[0]) == 6
    for _, refused, late in (first, second):
        assert "2 partitions, 0 to 1" in refused[0]
        assert "give a torch.nn.Module" in refused[1]
        assert "after the first smp.step" in late


def test_outputs_lose_their_graphs() -> None:
    outputs = smp.StepOutput([torch.ones(2, requires_grad=True) * 2, "text"])
    assert outputs.outputs[0].requires_grad
    detached = outputs.detach()
    assert not detached.outputs[0].requires_grad
    assert detached.outputs[1] == "text"


def test_outputs_are_a_sequence() -> None:
    outputs = smp.StepOutput([1.0, 2.0])
    assert (sum(outputs), len(outputs), outputs[0], outputs[-1:], list(outputs)) == (3.0, 2, 1.0, [2.0], [1.0, 2.0])
