"""Where the modules of a model go: as contexts say, or as they weigh."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import atorch.smp as smp
from tests.auto.training import messages
from tests.pool import Pool, on_ranks
from tests.smp.job import begun, gpt2, several
from tests.smp.test_step import WIDTH, Blocks, rows, said, train


class Nested(nn.Module):
    """The document's example: nested partitions, to one of which the model comes back; one module is outside of all."""

    def __init__(self, on: Callable[[int], AbstractContextManager[None]] = lambda index: nullcontext()) -> None:
        super().__init__()
        with on(1):
            self.child0 = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
            with on(2):
                self.child1 = nn.Linear(WIDTH, WIDTH)
            self.child2 = nn.Linear(WIDTH, WIDTH)
        self.child3 = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.child3(self.child2(torch.tanh(self.child1(self.child0(x)))) + x)


def assert_gradients(found: dict[str, nn.Parameter], plain: nn.Module) -> None:
    for name, parameter in found.items():
        torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad, rtol=1e-4, atol=1e-6)


def by_hand(whole: Blocks) -> Any:
    """A layer on each partition."""
    for number, layer in enumerate(whole.layers):
        smp.set_partition(layer, number)
    return smp.DistributedModel(whole)


@on_ranks(3)
def test_the_innermost_context_decides_and_a_partition_may_be_visited_twice(rank: int, size: int) -> None:
    torch.manual_seed(0)
    plain = Nested()
    right = plain(rows()).square().mean()
    right.backward()
    for active, pipeline in ((1, "interleaved"), (5, "interleaved"), (2, "simple")):
        config = {"microbatches": 4, "partitions": 3, "auto_partition": False, "active_microbatches": active}
        with begun({**config, "pipeline": pipeline}):
            torch.manual_seed(0)
            model: Any = smp.DistributedModel(Nested(smp.partition))
            assert "0 to 2" in said(lambda: smp.partition(3).__enter__())
            assert float(train(model, rows()).reduce_mean()) == pytest.approx(float(right.detach()), rel=1e-5)
            places = model.division.partition_of
            assert places == {"child0": 1, "child1": 2, "child2": 1, "child3": 0}
            assert model.division.places == (1, 2, 1, 0)
            found = dict(model.local_named_parameters())
            assert {name.partition(".")[0] for name in found} == {name for name, at in places.items() if at == rank}
            assert_gradients(found, plain)


class Again(Blocks):
    """Calls its first layer once more at the end: two stages of one process have its parameters."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layers[0](super().forward(x)))


@on_ranks(4)
def test_replicas_average_a_layer_of_two_stages_once_both_have_run(rank: int, size: int) -> None:
    torch.manual_seed(0)
    plain = Again(2)
    for replica in range(2):
        (plain(rows() + replica).square().mean() / 2).backward()
    with begun({"microbatches": 2, "partitions": 2, "auto_partition": False, "ddp": True}):
        torch.manual_seed(0)
        model = by_hand(Again(2))
        train(model, rows() + smp.dp_rank())
        assert model.division.places == (0, 1, 0)
        assert_gradients(dict(model.local_named_parameters()), plain)


class TiedEnds(Blocks):
    """Two layers with one weight, on two partitions."""

    def __init__(self) -> None:
        super().__init__(2)
        self.layers[1].weight = self.layers[0].weight


@on_ranks(2)
def test_gradients_of_a_weight_on_two_partitions_add_up_over_steps(rank: int, size: int) -> None:
    torch.manual_seed(0)
    plain = TiedEnds()
    for number in range(2):
        plain(rows() + number).square().mean().backward()
    with begun({"microbatches": 2, "partitions": 2, "auto_partition": False}):
        torch.manual_seed(0)
        model = by_hand(TiedEnds())
        for number in range(2):
            train(model, rows() + number)
        found = dict(model.local_named_parameters())
        assert len(found) == 2
        assert_gradients(found, plain)


class Uneven(nn.Module):
    """One layer that takes most of the time, and one that takes most of the memory."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20_000, WIDTH)
        self.narrow = nn.Linear(WIDTH, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.wide = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.middle(self.narrow(self.table(x)))
        for _ in range(40):
            y = self.wide(y)
        return y  # type: ignore[no-any-return]


def divided(rank: int, size: int, model: nn.Module, config: dict[str, Any], options: dict[str, Any], x: Tensor) -> Any:
    with begun({"microbatches": 2, "partitions": size, **config}):
        made = smp.DistributedModel(model, **options)

        @smp.step
        def look(model: Any, x: Tensor) -> Tensor:
            out = model(x)
            return getattr(out, "logits", out).float().mean()

        with torch.no_grad():
            look(made, x)
        return dict(made.division.partition_of), str(made.division)


def tokens(rows: int = 8, length: int = 12) -> Tensor:
    return torch.randint(64, (rows, length), generator=torch.Generator().manual_seed(0))


@pytest.mark.slow
def test_time_and_memory_are_weighed(pool: Pool) -> None:
    ways: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"memory_weight": 0.0}, {}),
        ({"memory_weight": 1.0}, {}),
        ({"memory_weight": 0.0, "skip_tracing": True}, {}),
        ({"memory_weight": 0.0}, {"trace_memory_usage": True}),
        ({"memory_weight": 0.0}, {"trace_execution_times": True}),
    ]
    first, second = pool.run(several, [(divided, Uneven(), *way, tokens()) for way in ways])
    (by_time, told), (by_memory, _), (by_parameters, _), (traced, _), _ = first
    assert by_time == traced == {"table": 0, "narrow": 0, "middle": 0, "wide": 1}
    assert "partition 1: wide (" in told
    assert by_memory == by_parameters == {"table": 0, "narrow": 1, "middle": 1, "wide": 1}
    assert first[-1][0] == second[-1][0], "of measured times, which may be anything, all processes have one division"


def test_modules_that_share_a_parameter_are_together(pool: Pool) -> None:
    torch.manual_seed(0)
    found, _ = pool.run(divided, gpt2(), {}, {}, tokens())[0]
    assert found["lm_head"] == found["transformer.wte"]
    assert sorted(set(found.values())) == [0, 1]


@on_ranks(2)
def test_what_is_where_is_told_by_the_first_process(rank: int, size: int) -> None:
    with messages() as found, begun({"microbatches": 2, "partitions": size}):
        train(smp.DistributedModel(Blocks(2)), rows())
    told = "\n".join(found)
    assert rank or "traced on the CPU" in told or torch.cuda.is_available()
    assert rank or "the model was partitioned:\npartition 0: layers.0" in told
    assert ("partition 1: layers.1" in told) == (rank == 0)


@on_ranks(2)
def test_contexts_are_ignored_where_partitions_are_automatic_and_may_be_missing(rank: int, size: int) -> None:
    for place, config in ((1, {}), (0, {"auto_partition": False, "default_partition": 1})):
        with begun({"microbatches": 2, "partitions": size, **config}):
            model = Blocks(2)
            with smp.partition(place):
                model.layers[0] = nn.Linear(WIDTH, WIDTH)
            made: Any = smp.DistributedModel(model)
            train(made, rows())
            assert dict(made.division.partition_of) == {"layers.0": 0, "layers.1": 1}


@on_ranks(2)
def test_partitions_that_would_be_empty_are_refused(rank: int, size: int) -> None:
    for is_automatic, told in ((False, "partition 1 of 2 has no module"), (True, "2 partitions need as many modules")):
        with begun({"microbatches": 2, "partitions": size, "auto_partition": is_automatic}):
            made = smp.DistributedModel(Blocks(1))
            assert told in said(lambda made=made: train(made, rows()))
