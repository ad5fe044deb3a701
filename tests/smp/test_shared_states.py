"""Optimizer states that replicas share out: training, what each process keeps, and what is saved."""

from __future__ import annotations

from typing import Any

import torch

import atorch.smp as smp
from atorch.errors import StrategyError
from atorch.runtime.data_parallel.zero1 import ShardedOptimizer
from tests.pool import Pool
from tests.smp.job import Way, batch_of, begun, distance, made, plainly_trained, train_step, trained


def states_of(model: Any, optimizer: Any) -> tuple[dict[str, Any], float]:
    """The whole state of the optimizer, and the share of this partition's that is kept here."""
    kept = sum(each.numel() for held in optimizer.inner.state.values() for each in held.values() if each.dim())
    own = sum(each.numel() for each in model.local_parameters())
    partial = optimizer.local_state_dict()
    assert partial["state"].keys() == dict(model.local_named_parameters()).keys()
    return optimizer.state_dict(), kept / own


def test_training_and_states_are_those_of_plain_training(pool: Pool) -> None:
    plain = plainly_trained("gpt2", 2, decay=0.5)
    wanted = plain.optimizer.state_dict()
    way = Way(decay=0.5, look=states_of)  # as a scheduler of the optimizer that was given does
    for seen in pool.run(trained, "gpt2", {"shard_optimizer_state": True, "partitions": 2}, "mean", way, ranks=4):
        saved, kept = seen.seen
        assert distance("gpt2", seen.state, plain.state) < 1e-4
        assert 0.45 < kept < 0.55, "the momentum of half of the parameters"
        assert saved["state"].keys() == wanted["state"].keys()
        for number, held in wanted["state"].items():
            for key, value in held.items():
                assert (saved["state"][number][key] - value).abs().max() < 1e-4
        assert saved["param_groups"][0]["lr"] == wanted["param_groups"][0]["lr"]
        plain.optimizer.load_state_dict(saved)


def with_masters(rank: int, size: int) -> tuple[bool, float]:
    with begun({"ddp": True, "shard_optimizer_state": True, "fp16": True}):
        model = smp.DistributedModel(made("cnn"))
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), static_loss_scale=256.0)
        train_step(model, "cnn", *batch_of("cnn", 0, rank), "mean")
        optimizer.step()
        inner: Any = optimizer.inner
        masters = sum(each.numel() for each in inner.inner.inner.stand_ins.values())
        return isinstance(inner.inner, ShardedOptimizer), masters / sum(each.numel() for each in model.parameters())


def test_masters_are_shared_out_too(pool: Pool) -> None:
    for is_shared, share in pool.run(with_masters):
        assert is_shared
        assert 0.4 < share < 0.6


def lamb(rank: int, size: int) -> str:
    with begun({"ddp": True, "shard_optimizer_state": True}):
        model = smp.DistributedModel(made("cnn"))
        smp.DistributedOptimizer(smp.optimizers.FusedLamb(model.parameters(), lr=1e-3))
        try:
            train_step(model, "cnn", *batch_of("cnn", 0, rank), "mean")
        except StrategyError as error:
            return str(error)
    return ""


def test_an_optimizer_that_needs_all_parameters_is_refused(pool: Pool) -> None:
    for told in pool.run(lamb):
        assert "shard_optimizer_state" in told
        assert "FusedLamb" in told
