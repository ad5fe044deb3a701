"""The distributed model: when it is partitioned, what its options do, and what its states hold."""

from __future__ import annotations

import itertools
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import atorch.smp as smp
from atorch.distributed import collectives
from atorch.smp.checkpointing import states
from tests.auto.training import messages, run_each
from tests.pool import Pool
from tests.smp.job import begun, several
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


def in_order(rank: int, size: int) -> list[str]:
    events: list[str] = []
    with begun({"microbatches": 2, "partitions": size}):
        model = model_of()
        optimizer = sgd(model)
        before = [said(call) for call in (model.local_state_dict, lambda: list(model.local_parameters()))]
        events += ["told early" for each in before if "before the model was partitioned" in each]
        events.append(str(model.partitioned))
        other = {name: torch.full_like(each, 0.25) for name, each in model.state_dict().items()}
        model.load_state_dict(other)
        value = next(iter(model.parameters()))
        events.append("not loaded yet" if float(value[0, 0].detach()) != 0.25 else "loaded early")
        removed = model.register_post_partition_hook(lambda: events.append("never"))
        removed.remove()

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
        events.append(said(lambda: model.register_post_partition_hook(hook))[:60])
    return events


def test_the_first_step_partitions_loads_and_calls_hooks_in_this_order(pool: Pool) -> None:
    for events in pool.run(in_order):
        assert events == [
            "told early",
            "told early",
            "False",
            "not loaded yet",
            "hook: partitioned True, loaded True",
            "model True",
            "forward",
            "forward",
            "ArgumentError: the model is partitioned already; register ho",
        ]


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


def optioned(rank: int, size: int, how: str, partitions: int) -> Any:
    options, steps, _ = OPTIONS[how]
    with begun({"microbatches": 2, "partitions": partitions, "ddp": True}):
        model = model_of(**options)
        replica = smp.dp_rank()
        for step in range(steps):
            before = gradients(model) if step else None
            train(model, rows() + replica)
        averaging = model.runner.averaging
        buckets = averaging._buckets
        inside = all(
            bucket.buffer().data_ptr() <= each.grad.data_ptr() < bucket.buffer().data_ptr() + bucket.buffer().nbytes
            for bucket in buckets
            for each in bucket.parameters()
        )
        return gradients(model), before, averaging._next, len(buckets), inside


@pytest.mark.parametrize("partitions", [1, 2])
def test_options_of_averaging(pool: Pool, partitions: int) -> None:
    right = plain_gradients(rows(), rows() + 1)
    for results in pool.run(several, [(optioned, how, partitions) for how in OPTIONS], ranks=2 * partitions):
        for how, (found, before, overlapped, buckets, inside) in zip(OPTIONS, results, strict=True):
            assert same(found, right, OPTIONS[how][2]), how
            assert overlapped == (0 if how == "at the end" else buckets)
            assert (buckets > 2) == (how == "small buckets")
            assert inside == (how == "views")
            if how == "every second":
                assert not same(before, right), "the first of two passes is not averaged"


class Branching(Blocks):
    def forward(self, x: Tensor, unused: bool) -> Tensor:
        for number, layer in enumerate(self.layers):
            if not (unused and number == 2):
                x = torch.tanh(layer(x))
        return x


def unused_on_one(rank: int, size: int) -> Any:
    with begun({"microbatches": 2, "ddp": True}):
        torch.manual_seed(0)
        model = smp.DistributedModel(Branching())

        @smp.step
        def step(model: Any, x: Tensor, unused: bool) -> None:
            model.backward(model(x, unused).square().mean())

        step(model, rows(), rank == 1)
        one = gradients(model)
        model.zero_grad()
        step(model, rows(), True)
        return one, [name for name, each in model.named_parameters() if each.grad is None]


def test_parameters_that_a_replica_leaves_unused_count_as_zero_there(pool: Pool) -> None:
    torch.manual_seed(0)
    plain = Branching()
    for unused in (False, True):
        (plain(rows(), unused).square().mean() / 2).backward()
    right = {name: each.grad for name, each in plain.named_parameters() if each.grad is not None}
    for one, none in pool.run(unused_on_one):
        assert same(one, right)
        assert none == ["layers.2.weight", "layers.2.bias"]


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


def buffers(rank: int, size: int, broadcasts: bool) -> float:
    with begun({"microbatches": 1, "ddp": True}):
        torch.manual_seed(0)
        model = smp.DistributedModel(Counting(), broadcast_buffers=broadcasts)
        for _ in range(2):
            train(model, torch.full((2, 8), float(rank + 1)))
        return float(model.module.seen)


def test_buffers_begin_a_step_as_the_first_replicas(pool: Pool) -> None:
    assert run_each(pool, buffers, [(True,), (False,)]) == [[2.0, 3.0], [2.0, 4.0]]


def hooked(rank: int, size: int) -> Any:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    with begun({"microbatches": 2, "ddp": True}):
        model = model_of()
        seen: list[int] = []

        def hook(state: Any, bucket: Any) -> Any:
            seen.append(bucket.index())
            return default_hooks.bf16_compress_hook(state, bucket)

        model.register_comm_hook(None, hook)
        twice = said(lambda: model.register_comm_hook(None, hook))
        train(model, rows() + rank)
        return gradients(model), seen, twice


def test_a_communication_hook_made_for_torch_reduces(pool: Pool) -> None:
    right = plain_gradients(rows(), rows() + 1)
    for found, seen, twice in pool.run(hooked):
        assert seen == [0]
        assert "one communication hook" in twice
        assert all(torch.allclose(each, right[name], rtol=2e-2, atol=1e-5) for name, each in found.items())
        assert not same(found, right), "it went through bf16"


def uneven(rank: int, size: int, divides: bool) -> Any:
    with begun({"microbatches": 2, "ddp": True}):
        model = model_of()
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        with model.join(divide_by_initial_world_size=divides):
            for step in range(3 if rank else 1):
                optimizer.zero_grad()
                train(model, rows() + step + 10 * rank)
                optimizer.step()
        return {name: each.clone() for name, each in model.state_dict().items()}


def test_replicas_join_with_uneven_numbers_of_batches(pool: Pool) -> None:
    for divides, found in zip((True, False), run_each(pool, uneven, [(True,), (False,)]), strict=True):
        torch.manual_seed(0)
        plain = Blocks()
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            batches = [rows() + step + 10 * rank for rank in range(2) if rank or step < 1]
            for batch in batches:
                (plain(batch).square().mean() / (2 if divides else len(batches))).backward()
            optimizer.step()
        for state, (name, value) in itertools.product(found, plain.state_dict().items()):
            assert torch.allclose(state[name], value, rtol=1e-4, atol=1e-6)


STATES: dict[str, dict[str, Any]] = {
    "model.state_dict()": {"partitions": 2},
    "optimizer.state_dict()": {"ddp": True, "shard_optimizer_state": True},
}


def alone_in_a_collective(rank: int, size: int, call: str) -> str:
    soon = timedelta(seconds=0.1)
    with begun({"microbatches": 2, **STATES[call]}):
        model = model_of()
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        train(model, rows())
        with mock.patch.object(states, "PATIENCE", soon), mock.patch.object(collectives, "MEETING", soon):
            ask = model.state_dict if call.startswith("model") else optimizer.state_dict
            message = said(ask) if rank == 0 else ""
        dist.barrier()
        return message


def test_a_state_that_some_ranks_do_not_ask_for_names_them(pool: Pool) -> None:
    found = run_each(pool, alone_in_a_collective, [(call,) for call in STATES], timeout=60)
    for call, (message, _) in zip(STATES, found, strict=True):
        assert call in message
        assert "on rank 0 but not on 1" in message


def on_the_host(rank: int, size: int) -> Any:
    with begun({"microbatches": 2, "partitions": size}):
        model = model_of()
        train(model, rows())
        whole = model.cpu().module
        return float(whole(rows()).mean().detach()), list(whole.state_dict()), said(lambda: train(model, rows()))


def test_the_whole_model_comes_to_the_host(pool: Pool) -> None:
    torch.manual_seed(0)
    plain = Blocks()
    for value, names, after in pool.run(on_the_host):
        assert value == pytest.approx(float(plain(rows()).mean().detach()), rel=1e-5)
        assert names == list(plain.state_dict())
        assert "model.cpu()" in after


def differing(rank: int, size: int, how: str) -> str:
    with begun({"microbatches": 2, "partitions": 2, "ddp": True}):
        torch.manual_seed(0)
        model = smp.DistributedModel(
            Blocks(5 if how == "model" and rank == 3 else 4), bucket_cap_mb=1 if how == "options" and rank == 2 else 25
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2 if how == "optimizer" and rank == 1 else 0.1)
        smp.DistributedOptimizer(optimizer)
        return said(lambda: train(model, rows(6 if how == "batch" and rank == 1 else 8)))


DIFFERENCES = {
    "model": "layers.4",
    "options": "bucket_cap_mb",
    "optimizer": "lr",
    "batch": "different sizes",
}


def test_a_process_that_differs_is_told_on_all(pool: Pool) -> None:
    for found in pool.run(several, [(differing, how) for how in DIFFERENCES], ranks=4, timeout=40):
        for how, message in zip(DIFFERENCES, found, strict=True):
            assert DIFFERENCES[how] in message


def own_batches(rank: int, size: int, differ: bool) -> list[str]:
    with begun({"microbatches": 2, "partitions": 2}), messages() as told:
        train(model_of(), rows() + rank * differ)
    return told


def test_processes_of_a_pipeline_with_batches_of_their_own_are_warned(pool: Pool) -> None:
    alike, apart = pool.run(several, [(own_batches, False), (own_batches, True)])[0]
    assert not any("different batches" in message for message in alike)
    assert any("different batches" in message for message in apart)
