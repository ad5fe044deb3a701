"""On several processes gradients are those of the whole batch's loss, whatever the loss is a mean over, or a sum."""

import logging
import math

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from atorch import auto_accelerate
from atorch.errors import ArgumentError
from atorch.logs import logger
from atorch.profiler.memory_tracker import CommCounter
from tests.auto.loss_job import (
    BATCH,
    LOSSES,
    Causal,
    Net,
    Samples,
    accelerated,
    added_up,
    batch_of,
    by_label,
    contrast,
    deviation,
    gradient_error,
    in_a_tuple,
    value,
)

EXACT = 1e-4


def count_mask(batch):
    return batch["mask"].sum()


SPLIT_BY_DATA = {
    "zero1": ["zero1"],
    "zero2": ["zero2"],
    "fsdp": ["fsdp"],
    "chunk": [("chunk", {"budget_bytes": 100_000})],
    "micro_batch": ["ddp", ("micro_batch", {"size": 3})],
    "one micro-batch": ["ddp", ("micro_batch", {"size": "auto"})],
    "micro_batch of fsdp": ["fsdp", ("micro_batch", {"size": 2, "reduce": "each"})],
}


@pytest.mark.parametrize("name", LOSSES)
def test_ddp_is_training_on_the_whole_batch(pool, name):
    assert max(pool.run(deviation, name, ["ddp"], ranks=2)) <= EXACT


@pytest.mark.parametrize("name", ["sum", "labels", "causal"])
@pytest.mark.parametrize("method", SPLIT_BY_DATA)
def test_every_way_to_share_out_samples(pool, method, name):
    assert max(pool.run(deviation, name, SPLIT_BY_DATA[method], ranks=2)) <= EXACT


@pytest.mark.parametrize("name", ["labels", "causal", "by row"])
@pytest.mark.parametrize("beside", [[], [("micro_batch", {"size": 2})]], ids=["whole", "in micro-batches"])
def test_labels_that_differ_in_later_batches_alone(pool, name, beside):
    assert max(pool.run(later, name, ["ddp", *beside], ranks=2)) <= EXACT


@pytest.mark.parametrize("name", ["sum", "labels", "mask", "causal"])
def test_one_row_a_rank(pool, name):
    assert max(pool.run(alone, name, ["fsdp"], ranks=2)) <= EXACT


def later(rank, size, name, strategy):
    return deviation(rank, size, name, strategy, full_first=True)


def alone(rank, size, name, strategy):
    return deviation(rank, size, name, strategy, batch_size=size)


SPLIT = {
    "tensor": ["tensor_parallel", "ddp"],
    "pipeline": [("pipeline_parallel", {"split_points": ["layers.1"], "micro_batches": 2}), "ddp"],
}


@pytest.mark.parametrize("name", ["sum", "labels"])
@pytest.mark.parametrize("axis", SPLIT)
def test_beside_what_splits_the_model(pool, axis, name):
    mesh = ("parallel_mode", ([(axis, 2), ("data", 2)], None))
    assert max(pool.run(deviation, name, [mesh, *SPLIT[axis]], ranks=4)) <= EXACT


@pytest.mark.parametrize("name", ["sum", "labels"])
@pytest.mark.parametrize("beside", [[], [("micro_batch", {"size": 2})]], ids=["whole", "in micro-batches"])
def test_loss_scales(pool, beside, name):
    assert max(pool.run(deviation, name, ["ddp", ("amp_native", "fp16"), *beside], ranks=2)) <= 1e-2


def ragged(rank, size, name):
    """Ranks have another number of rows, in the first step or in a later one."""
    make, loss_func = LOSSES[name]
    data = Samples()
    errors = []
    for first in ([0, 1, 2, 3], [4, 5]), ([0, 1, 2, 3], [4, 5, 6, 7]):
        result = accelerated(make, loss_func)
        for shares in (first, ([8, 9, 10], [11])):
            batches = [batch_of(data, *indices) for indices in shares]
            errors.append(gradient_error(result, make, loss_func, batches, rank))
    return max(errors)


@pytest.mark.parametrize("name", ["rows", "sum", "labels", "causal"])
def test_ranks_with_different_numbers_of_rows(pool, name):
    assert max(pool.run(ragged, name, ranks=2)) <= EXACT


def without_labels(rank, size, name, strategy):
    """One rank has nothing that counts, in the second step; the loss it prints is 0/0."""
    make, loss_func = LOSSES[name]
    data = Samples()
    result = accelerated(make, loss_func, strategy)
    shares = [batch_of(data, 0, 1, 2, 3), batch_of(data, 4, 5, 6, 7)]
    errors = [gradient_error(result, make, loss_func, shares, rank)]
    shares[1]["labels"][:], shares[1]["mask"][:] = -100, 0.0
    batch = shares[rank]
    printed = float(result.loss_func(batch, result.model(**batch)).detach())
    assert math.isnan(printed) == (rank == 1)
    return max(*errors, gradient_error(result, make, loss_func, shares, rank))


@pytest.mark.parametrize("name", ["labels", "mask", "causal"])
@pytest.mark.parametrize("strategy", [["ddp"], ["ddp", ("micro_batch", {"size": 2})]], ids=["whole", "micro-batches"])
def test_a_rank_without_labels_spoils_nothing(pool, name, strategy):
    assert max(pool.run(without_labels, name, strategy, ranks=2)) <= EXACT


def printed(rank, size):
    """The loss is the user's own, whatever becomes of its gradient, and so it is where no gradient is asked for."""
    data = Samples()
    result = accelerated(Net, in_a_tuple)
    batch = batch_of(data, 2 * rank, 2 * rank + 1)
    with torch.no_grad():
        evaluated = result.loss_func(batch, result.model(**batch))
    loss, other = result.loss_func(batch, result.model(**batch))
    expected = float(added_up(batch, Net()(**batch)))
    return abs(float(evaluated[0]) - expected), abs(float(loss) - expected), other


def test_the_loss_that_is_printed_is_the_users(pool):
    for evaluated, loss, other in pool.run(printed, ranks=2):
        assert evaluated <= 1e-5
        assert loss <= 1e-5
        assert other == 1.0


def sent(rank, size, name):
    """What is sent in the third step, when all has been found out, and what DistributedDataParallel alone sends."""
    make, loss_func = LOSSES[name]
    _, result, _ = auto_accelerate(
        make(),
        torch.optim.SGD,
        Samples(),
        loss_func,
        model_input_format="unpack_dict",
        optim_args={"lr": 0.1},
        dataloader_args={"batch_size": BATCH},
        load_strategy=["ddp"],
    )
    counts = []
    for batch in result.dataloader:
        with CommCounter() as messages:
            result.step(batch)
        counts.append([(kind, *figures) for (kind, _), figures in messages.counts.items()])
    return counts[-1:], accelerated_alone(make, loss_func)


def accelerated_alone(make, loss_func):
    """What torch's DistributedDataParallel sends in its steps."""
    model, data, counts = DistributedDataParallel(make(), gradient_as_bucket_view=True), Samples(), []
    for _ in range(3):
        with CommCounter() as messages:
            batch = batch_of(data, 0, 1)
            value(loss_func(batch, model(**batch))).backward()
        counts.append([(kind, *figures) for (kind, _), figures in messages.counts.items()])
    return counts[-1:]


@pytest.mark.parametrize(("name", "more"), [("rows", 0), ("sum", 0), ("tuple", 0), ("labels", 1)])
def test_a_mean_over_rows_costs_nothing_a_step_and_one_over_labels_a_number(pool, name, more):
    for mine, plain in pool.run(sent, name, ranks=2):
        for step, theirs in zip(mine, plain, strict=True):
            calls = sum(count for _, count, _ in step) - sum(count for _, count, _ in theirs)
            size = sum(size for *_, size in step) - sum(size for *_, size in theirs)
            assert (calls, size) == (more, 8.0 * more)


def classes(rank, size):
    """A class a row, all of which count: a mean over labels that is one over rows."""
    model, x, y = nn.Linear(6, 3), torch.randn(24, 6), torch.arange(24) % 3
    _, result, _ = auto_accelerate(
        model,
        torch.optim.SGD,
        TensorDataset(x, y),
        lambda batch, output: nn.functional.cross_entropy(output, batch[1]),
        prepare_input=lambda data, device: data,
        optim_args={"lr": 0.1},
        dataloader_args={"batch_size": 8},
        load_strategy=["ddp"],
    )
    counts = []
    for batch in result.dataloader:
        with CommCounter() as messages:
            result.loss_func(batch, result.model(batch[0])).backward()
        counts.append(sum(count for count, _ in messages.counts.values()))
    return counts


def test_classes_of_rows_cost_nothing_a_step(pool):
    for first, *_, last in pool.run(classes, ranks=2):
        assert last == 1, "the reduction of the gradients"
        assert first > 1


def told(rank, size, loss_weight):
    """What a loss over the whole batch is told, in three steps."""
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logger.addHandler(handler)
    try:
        result, data = accelerated(Net, contrast, loss_weight=loss_weight), Samples()
        for step in range(3):
            batch = batch_of(data, *range(4 * rank + 8 * step, 4 * rank + 8 * step + 4))
            result.loss_func(batch, result.model(**batch)).backward()
    finally:
        logger.removeHandler(handler)
    return [message for message in records if "averaged over the processes" in message]


def test_a_loss_that_compares_samples_is_told_once(pool):
    first, second = pool.run(told, "auto", ranks=2)
    assert len(first) == 1
    assert second == []
    assert "two parts have" in first[0]
    assert "loss_weight" in first[0]
    assert pool.run(told, "rows", ranks=2) == [[], []]


def told_of_classes(rank, size):
    """What a mean by class weights is told whose first batch has one class."""
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logger.addHandler(handler)
    x, y = torch.randn(16, 6), torch.tensor([0] * 8 + [1, 0, 0, 0] * 2)
    weight = torch.tensor([1.0, 9.0])
    try:
        _, result, _ = auto_accelerate(
            nn.Linear(6, 2),
            torch.optim.SGD,
            loss_func=lambda batch, output: nn.functional.cross_entropy(output, batch[1], weight=weight),
            optim_args={"lr": 0.1},
            load_strategy=["ddp"],
        )
        for step in range(2):
            rows = slice(8 * step + 4 * rank, 8 * step + 4 * rank + 4)
            result.loss_func((x[rows], y[rows]), result.model(x[rows])).backward()
    finally:
        logger.removeHandler(handler)
    return ["a later batch shows" in message for message in records if "averaged over the processes" in message]


def test_weights_of_classes_are_told_when_a_batch_shows_them(pool):
    assert pool.run(told_of_classes, ranks=2) == [[True], [True]]


def padding_free(rank, size, strategy, inside):
    """How far weights are off after steps of one row of tokens a process, as long as it likes."""

    class Packed(Causal):
        def forward(self, tokens, labels, **others):
            assert len(tokens) == 1
            return super().forward(tokens, labels)["loss"] if inside else self.net(tokens)

    def loss_func(batch, output):
        if inside:
            return output
        return nn.functional.cross_entropy(output[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())

    rows = []
    for length in (12, 7, 9, 15):
        tokens = torch.arange(length)[None] * 3 % 11
        labels = torch.where(torch.arange(length) < length - 2 - length % 3 * 3, -100, tokens)
        rows.append({"tokens": tokens, "labels": labels})
    plain, start = Packed(), Packed()
    optim = torch.optim.SGD(plain.parameters(), lr=0.1)
    _, result, _ = auto_accelerate(
        Packed(), torch.optim.SGD, loss_func=loss_func, optim_args={"lr": 0.1}, load_strategy=[strategy]
    )
    for step in range(2):
        pair = rows[2 * step : 2 * step + 2]
        counts = [int((row["labels"][:, 1:] != -100).sum()) for row in pair]
        optim.zero_grad()
        sum(loss_func(row, plain(**row)) * n / sum(counts) for row, n in zip(pair, counts, strict=True)).backward()
        optim.step()
        result.optim.zero_grad()
        result.loss_func(pair[rank], result.model(**pair[rank])).backward()
        result.optim.step()
    values = result.model.state_dict()
    values = {
        name.removeprefix("module."): getattr(each, "full_tensor", lambda e=each: e)() for name, each in values.items()
    }
    ref, base = plain.state_dict(), start.state_dict()
    off = sum(float((values[name] - each).square().sum()) for name, each in ref.items())
    return (off / sum(float((each - base[name]).square().sum()) for name, each in ref.items())) ** 0.5


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("inside", [True, False])
def test_padding_free_rows_of_different_lengths(pool, strategy, inside):
    assert max(pool.run(padding_free, strategy, inside, ranks=2)) < 1e-5


def two_losses(rank, size):
    """Two kinds of batches a step, a sum and a mean over labels, as with a generator and its critic."""
    data = Samples()

    def either(batch, output):
        return by_label(batch, output) if "labels" in batch else added_up(batch, output)

    result, worst = accelerated(Net, either), 0.0
    for step in range(3):
        shares = [batch_of(data, *range(8 * step + 4 * i, 8 * step + 4 * i + 4)) for i in range(size)]
        for left_out in ("labels", "y"):
            kind = [{key: each for key, each in share.items() if key != left_out} for share in shares]
            worst = max(worst, gradient_error(result, Net, either, kind, rank))
    return worst


def test_two_losses_a_step(pool):
    assert max(pool.run(two_losses, ranks=2)) <= EXACT


def compiled(rank, size, beside):
    """The deviation of compiled blocks whose loss is looked at by running the model, and how many graphs there were."""
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    counters.clear()
    off = deviation(rank, size, "causal", [beside, ("compile", {"backend": "aot_eager"})], verify=False)
    return off, counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("beside", ["ddp", ("chunk", {"budget_bytes": 100_000})], ids=["ddp", "chunk"])
def test_parts_of_a_batch_are_not_compiled_for(pool, beside):
    for off, num_graphs in pool.run(compiled, beside, ranks=2):
        assert off <= EXACT
        assert num_graphs == 1


def named(rank, size, name, loss_weight):
    make, loss_func = LOSSES[name]
    data = Samples()
    result = accelerated(make, loss_func, loss_weight=loss_weight)
    calls = []

    def counted(batch, output):
        calls.append(1)
        return loss_func(batch, output)

    result = accelerated(make, counted, loss_weight=loss_weight)
    shares = [batch_of(data, *range(4 * i, 4 * i + 4)) for i in range(size)]
    return gradient_error(result, make, loss_func, shares, rank), len(calls)


@pytest.mark.parametrize(
    ("name", "loss_weight"),
    [("sum", "sum"), ("labels", "labels"), ("causal", "shifted_labels"), ("mask", "mask"), ("mask", count_mask)],
    ids=["sum", "labels", "shifted", "mask", "function"],
)
def test_a_named_rule_is_taken_as_it_is(pool, name, loss_weight):
    for error, calls in pool.run(named, name, loss_weight, ranks=2):
        assert error <= EXACT
        assert calls == 1


@pytest.mark.parametrize("wrong", [None, 3, ""])
def test_wrong_rules_are_refused(wrong):
    with pytest.raises(ArgumentError, match="loss_weight"):
        auto_accelerate(Net(), load_strategy=[], loss_weight=wrong)


@pytest.mark.nightly
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("method", SPLIT_BY_DATA)
def test_on_four_ranks(pool, method, name):
    assert max(pool.run(deviation, name, SPLIT_BY_DATA[method], ranks=4)) <= EXACT
