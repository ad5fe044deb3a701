"""The distributed model: when it is partitioned, what its options do, and what its states hold."""

from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import atorch.smp as smp
from atorch.distributed import collectives
from atorch.smp.checkpointing import states
from tests.auto.training import messages
from tests.pool import Pool, on_ranks
from tests.smp.job import begun
from tests.smp.test_step import Blocks, model_of, rows, said, train


def sgd(model: nn.Module) -> Any:
    return smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.1, eps=1e-2))


def gradients(model: Any) -> dict[str, Tensor]:
    return {name: each.grad.clone() for name, each in model.local_named_parameters()}


def plain_gradients(*batches: Tensor) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Blocks()
    for batch in batches:
        (model(batch).square().mean() / len(batches)).backward()
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def same(found: dict[str, Tensor], right: dict[str, Tensor], factor: float = 1.0) -> bool:
    return all(torch.allclose(each, factor * right[name], rtol=1e-4, atol=1e-7) for name, each in found.items())


@on_ranks(2)
def test_the_first_step_partitions_loads_and_calls_hooks_in_this_order(rank: int, size: int) -> None:
    events: list[str] = []
    with begun({"microbatches": 2, "partitions": size}):
        model = model_of()
        optimizer = sgd(model)
        for call in (model.local_state_dict, lambda: list(model.local_parameters())):
            assert "before the model was partitioned" in said(call)
        assert not model.partitioned
        model.load_state_dict({name: torch.full_like(each, 0.25) for name, each in model.state_dict().items()})
        assert float(next(model.parameters())[0, 0].detach()) != 0.25, "not loaded yet"
        model.register_post_partition_hook(lambda: events.append("never")).remove()

        def hook(given: Any, its_optimizer: Any) -> None:
            assert (given, its_optimizer) == (model, optimizer)
            loaded = all(bool((each == 0.25).all()) for each in model.local_parameters())
            events.append(f"hook: partitioned {model.partitioned}, loaded {loaded}")

        model.register_post_partition_hook(hook)
        model.register_post_partition_hook(lambda given: events.append(f"model {given is model}"))

        @smp.step
        def step(model: Any, x: Tensor) -> Tensor:
            if not smp.is_tracing():
                events.append("forward")
            return model(x).sum()

        with torch.no_grad():
            step(model, rows())
        assert "partitioned already" in said(lambda: model.register_post_partition_hook(hook))
    assert events == ["hook: partitioned True, loaded True", "model True", "forward", "forward"]


def parts_of(rank: int, size: int) -> tuple[list[str], list[str], list[str], list[str]]:
    with begun({"microbatches": 2, "partitions": size}):
        model = model_of()
        train(model, rows())
        modules = [name for name, _ in model.local_named_modules()]
        assert len(list(model.local_modules())) == len(modules)
        assert [id(each) for each in model.local_parameters()] == [
            id(each) for _, each in model.local_named_parameters()
        ]
        names = [name for name, _ in model.local_named_parameters()]
        assert list(model.local_buffers()) == [each for _, each in model.local_named_buffers()] == []
        return list(names), list(model.local_state_dict()), modules, list(model.state_dict())


def test_what_is_local_is_of_one_partition(pool: Pool) -> None:
    first, second = pool.run(parts_of)
    whole = list(Blocks().state_dict())
    assert first[0] + second[0] == whole
    for names, state, modules, gathered in (first, second):
        assert set(state) == {*names, "_smp_is_partial", "_smp_cuts"}
        assert {name.rpartition(".")[0] for name in names} <= set(modules)
        assert gathered == whole


OPTIONS: dict[str, tuple[dict[str, Any], int, float]] = {
    # options, steps before gradients are looked at, by how much they are the plain ones
    "defaults": ({}, 1, 1.0),
    "summed": ({"average_grads_across_microbatches": False}, 1, 2.0),
    "at the end": ({"overlapping_allreduce": False}, 1, 1.0),
    "small buckets": ({"bucket_cap_mb": 1e-4}, 1, 1.0),
    "views": ({"gradient_as_bucket_view": True}, 1, 1.0),
    "every second": ({"backward_passes_per_step": 2}, 2, 2.0),
}


@pytest.mark.parametrize("size", [2, 4])
@on_ranks(None)
def test_options_of_averaging(rank: int, size: int) -> None:
    right = plain_gradients(rows(), rows() + 1)
    for how, (options, steps, factor) in OPTIONS.items():
        with begun({"microbatches": 2, "partitions": size // 2, "ddp": True}):
            model = model_of(**options)
            for step in range(steps):
                assert not step or not same(gradients(model), right), "the first of two passes is not averaged"
                train(model, rows() + smp.dp_rank())
            assert same(gradients(model), right, factor), how
            averaging = model.runner.averaging
            buckets = averaging._buckets
            assert averaging._next == (0 if how == "at the end" else len(buckets))
            assert (len(buckets) > 2) == (how == "small buckets")
            held = [(bucket.buffer(), each.grad) for bucket in buckets for each in bucket.parameters()]
            inside = [0 <= grad.data_ptr() - whole.data_ptr() < whole.nbytes for whole, grad in held]
            assert all(inside) == (how == "views")


class Branching(Blocks):
    def forward(self, x: Tensor, unused: bool) -> Tensor:
        for number, layer in enumerate(self.layers):
            if not (unused and number == 2):
                x = torch.tanh(layer(x))
        return x


@on_ranks(2)
def test_parameters_that_a_replica_leaves_unused_count_as_zero_there(rank: int, size: int) -> None:
    torch.manual_seed(0)
    plain = Branching()
    for unused in (False, True):
        (plain(rows(), unused).square().mean() / 2).backward()
    with begun({"microbatches": 2, "ddp": True}):
        torch.manual_seed(0)
        model = smp.DistributedModel(Branching())

        @smp.step
        def step(model: Any, x: Tensor, unused: bool) -> None:
            model.backward(model(x, unused).square().mean())

        step(model, rows(), rank == 1)
        assert same(gradients(model), {name: each.grad for name, each in plain.named_parameters()})
        model.zero_grad()
        step(model, rows(), True)
        without = [name for name, each in model.named_parameters() if each.grad is None]
    assert without == ["layers.2.weight", "layers.2.bias"]


class Counting(Blocks):
    """Has a buffer that every replica changes by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.seen, Tensor)
        if self.training:
            self.seen += x.mean().detach()
        return super().forward(x)


@on_ranks(2)
def test_buffers_begin_a_step_as_the_first_replicas(rank: int, size: int) -> None:
    for broadcasts, seen in ((True, [2.0, 3.0]), (False, [2.0, 4.0])):
        with begun({"microbatches": 1, "ddp": True}):
            model: Any = smp.DistributedModel(Counting(), broadcast_buffers=broadcasts)
            for _ in range(2):
                train(model, torch.full((2, 8), float(rank + 1)))
            assert float(model.module.seen) == seen[rank]


@on_ranks(2)
def test_a_communication_hook_made_for_torch_reduces(rank: int, size: int) -> None:
    right, seen = plain_gradients(rows(), rows() + 1), []
    with begun({"microbatches": 2, "ddp": True}):
        model = model_of()

        def hook(state: Any, bucket: Any) -> Any:
            seen.append(bucket.index())
            return default_hooks.bf16_compress_hook(state, bucket)

        model.register_comm_hook(None, hook)
        assert "one communication hook" in said(lambda: model.register_comm_hook(None, hook))
        train(model, rows() + rank)
        found = gradients(model)
    assert seen == [0]
    assert all(torch.allclose(each, right[name], rtol=2e-2, atol=1e-5) for name, each in found.items())
    assert not same(found, right), "it went through bf16"


@on_ranks(2)
def test_replicas_join_with_uneven_numbers_of_batches(rank: int, size: int) -> None:
    for divides in (True, False):
        torch.manual_seed(0)
        plain = Blocks()
        optimizer: Any = torch.optim.SGD(plain.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            batches = [rows() + step + 10 * rank for rank in range(2) if rank or step < 1]
            for batch in batches:
                (plain(batch).square().mean() / (2 if divides else len(batches))).backward()
            optimizer.step()
        with begun({"microbatches": 2, "ddp": True}):
            model = model_of()
            optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            with model.join(divide_by_initial_world_size=divides):
                for step in range(3 if rank else 1):
                    optimizer.zero_grad()
                    train(model, rows() + step + 10 * rank)
                    optimizer.step()
            state = model.state_dict()
        for name, value in plain.state_dict().items():
            assert torch.allclose(state[name], value, rtol=1e-4, atol=1e-6)


STATES: dict[str, dict[str, Any]] = {
    "model.state_dict()": {"partitions": 2},
    "optimizer.state_dict()": {"ddp": True, "shard_optimizer_state": True},
}


@on_ranks(2, timeout=60)
def test_a_state_that_some_ranks_do_not_ask_for_names_them(rank: int, size: int) -> None:
    soon = timedelta(seconds=0.1)
    for call, config in STATES.items():
        with begun({"microbatches": 2, **config}):
            model = model_of()
            optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            train(model, rows())
            with mock.patch.object(states, "PATIENCE", soon), mock.patch.object(collectives, "MEETING", soon):
                ask = model.state_dict if call.startswith("model") else optimizer.state_dict
                told = said(ask) if rank == 0 else ""
            dist.barrier()
        assert rank or (call in told and "on rank 0 but not on 1" in told)


@on_ranks(2)
def test_the_whole_model_comes_to_the_host(rank: int, size: int) -> None:
    torch.manual_seed(0)
    plain = Blocks()
    with begun({"microbatches": 2, "partitions": size}):
        model = model_of()
        train(model, rows())
        whole = model.cpu().module
        torch.testing.assert_close(whole(rows()), plain(rows()))
        assert list(whole.state_dict()) == list(plain.state_dict())
        assert "model.cpu()" in said(lambda: train(model, rows()))


DIFFERENCES = {"model": "layers.4", "options": "bucket_cap_mb", "optimizer": "lr", "batch": "different sizes"}


@on_ranks(4, timeout=40)
def test_a_process_that_differs_is_told_on_all(rank: int, size: int) -> None:
    for how, told in DIFFERENCES.items():
        with begun({"microbatches": 2, "partitions": 2, "ddp": True}):
            torch.manual_seed(0)
            model = smp.DistributedModel(
                Blocks(5 if how == "model" and rank == 3 else 4),
                bucket_cap_mb=1 if how == "options" and rank == 2 else 25,
            )
            lr = 0.2 if how == "optimizer" and rank == 1 else 0.1
            smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=lr))
            batch = rows(6 if how == "batch" and rank == 1 else 8)
            assert told in said(lambda model=model, batch=batch: train(model, batch))


@on_ranks(2)
def test_processes_of_a_pipeline_with_batches_of_their_own_are_warned(rank: int, size: int) -> None:
    for differ in (False, True):
        with begun({"microbatches": 2, "partitions": 2}), messages() as told:
            train(model_of(), rows() + rank * differ)
        assert rank or any("different batches" in message for message in told) == differ
