"""Where the modules of a model go: as contexts say, or as they weigh."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import atorch.smp as smp
from tests.pool import Pool
from tests.smp.job import begun, gpt2
from tests.smp.test_step import WIDTH, Blocks, rows, said


class Nested(nn.Module):
    """Partitions inside of one another, to one of which the model comes back, and one module outside of all."""

    def __init__(self, on: Callable[[int], AbstractContextManager[None]] = lambda index: nullcontext()) -> None:
        super().__init__()
        with on(1):
            self.child0 = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
            with on(2):
                self.child1 = nn.Linear(WIDTH, WIDTH)
            self.child2 = nn.Linear(WIDTH, WIDTH)
        self.child3 = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.child3(self.child2(torch.tanh(self.child1(self.child0(x)))) + x)
        return y


@smp.step
def train(model: Any, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    model.backward(loss)
    return loss


def nested(rank: int, size: int, active: int, pipeline: str) -> Any:
    config = {"microbatches": 4, "partitions": 3, "auto_partition": False, "active_microbatches": active}
    with begun({**config, "pipeline": pipeline}):
        torch.manual_seed(0)
        model = smp.DistributedModel(Nested(smp.partition))
        outside = said(lambda: smp.partition(3).__enter__())
        loss = train(model, rows()).reduce_mean().item()
        found = {name: each.grad for name, each in model.local_named_parameters()}
        return loss, found, model.division.partition_of, model.division.places, outside


@pytest.mark.parametrize(("active", "pipeline"), [(1, "interleaved"), (5, "interleaved"), (2, "simple")])
def test_the_innermost_context_decides_and_a_partition_may_be_visited_twice(
    pool: Pool, active: int, pipeline: str
) -> None:
    torch.manual_seed(0)
    plain = Nested()
    right = plain(rows()).square().mean()
    right.backward()
    for rank, (loss, found, places, stages, outside) in enumerate(pool.run(nested, active, pipeline, ranks=3)):
        assert loss == pytest.approx(float(right.detach()), rel=1e-5)
        assert places == {"child0": 1, "child1": 2, "child2": 1, "child3": 0}
        assert stages == (1, 2, 1, 0)
        assert {name.partition(".")[0] for name in found} == {name for name, at in places.items() if at == rank}
        assert "0 to 2" in outside
        for name, each in found.items():
            torch.testing.assert_close(each, plain.get_parameter(name).grad, rtol=1e-4, atol=1e-6)


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


def test_time_and_memory_are_weighed(pool: Pool) -> None:
    by_time, told = pool.run(divided, Uneven(), {"memory_weight": 0.0}, {}, tokens())[0]
    assert by_time == {"table": 0, "narrow": 0, "middle": 0, "wide": 1}
    assert "partition 1: wide (" in told
    by_memory, _ = pool.run(divided, Uneven(), {"memory_weight": 1.0}, {}, tokens())[0]
    assert by_memory == {"table": 0, "narrow": 1, "middle": 1, "wide": 1}
    for options in ({"trace_memory_usage": True}, {"trace_execution_times": True}):
        found = pool.run(divided, Uneven(), {"memory_weight": 0.0}, options, tokens())
        assert "trace_memory_usage" not in options or found[0][0]["wide"] == 1  # what is measured may be anything
        assert found[0][0] == found[1][0], "all processes have one division"


def test_without_tracing_parameters_alone_count(pool: Pool) -> None:
    found, _ = pool.run(divided, Uneven(), {"memory_weight": 0.0, "skip_tracing": True}, {}, tokens())[0]
    assert found == {"table": 0, "narrow": 1, "middle": 1, "wide": 1}


def test_modules_that_share_a_parameter_are_together(pool: Pool) -> None:
    torch.manual_seed(0)
    found, _ = pool.run(divided, gpt2(), {}, {}, tokens())[0]
    assert found["lm_head"] == found["transformer.wte"]
    assert sorted(set(found.values())) == [0, 1]


def told(rank: int, size: int) -> list[str]:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("atorch").addHandler(handler)
    try:
        with begun({"microbatches": 2, "partitions": size}):
            train(smp.DistributedModel(Blocks(2)), rows())
    finally:
        logging.getLogger("atorch").removeHandler(handler)
    return messages


def test_what_is_where_is_told_by_the_first_process(pool: Pool) -> None:
    first, second = pool.run(told)
    whole = "\n".join(first)
    assert "traced on the CPU" in whole or torch.cuda.is_available()
    assert "the model was partitioned:\npartition 0: layers.0" in whole
    assert "partition 1: layers.1" in whole
    assert not any("partition 1" in each for each in second)


def contexts(rank: int, size: int, how: str) -> Any:
    config: dict[str, Any] = {"microbatches": 2, "partitions": size, "auto_partition": how == "auto"}
    if how == "default":
        config["default_partition"] = 1
    with begun(config):
        with smp.partition(0 if how == "default" else 1):
            first = nn.Linear(WIDTH, WIDTH)
        model = Blocks(2)
        model.layers[0] = first
        made = smp.DistributedModel(model)
        message = said(lambda: train(made, rows()))
        return message, None if made.division is None else dict(made.division.partition_of)


def test_contexts_are_ignored_where_partitions_are_automatic(pool: Pool) -> None:
    for message, found in pool.run(contexts, "auto"):
        assert (message, found) == ("", {"layers.0": 0, "layers.1": 1})


def test_modules_outside_of_contexts_are_on_the_default_partition(pool: Pool) -> None:
    for message, found in pool.run(contexts, "default"):
        assert (message, found) == ("", {"layers.0": 0, "layers.1": 1})


def empty(rank: int, size: int, count: int) -> str:
    with begun({"microbatches": 2, "partitions": size, "auto_partition": count > 0}):
        made = smp.DistributedModel(Blocks(max(count, 1)))
        return said(lambda: train(made, rows()))


def test_partitions_that_would_be_empty_are_refused(pool: Pool) -> None:
    for message in pool.run(empty, 0):
        assert "partition 1 of 2 has no module" in message
    for message in pool.run(empty, 1):
        assert "2 partitions need as many modules" in message
