"""On several processes gradients are those of the whole batch's loss, whatever the loss is a mean over, or a sum."""

import math
from functools import partial

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from atorch.profiler.memory_tracker import CommCounter
from tests.auto import loss_job
from tests.auto.training import accelerate, assert_trains_like_plain, messages, run_each

EXACT = 1e-4


SPLIT_BY_DATA = {
    "zero1": ["zero1"],
    "zero2": ["zero2"],
    "fsdp": ["fsdp"],
    "chunk": [("chunk", {"budget_bytes": 100_000})],
    "micro_batch": ["ddp", ("micro_batch", {"size": 3})],
    "one micro-batch": ["ddp", ("micro_batch", {"size": "auto"})],
    "micro_batch of fsdp": ["fsdp", ("micro_batch", {"size": 2, "reduce": "each"})],
}
IN_PARTS = ("micro_batch", "one micro-batch", "micro_batch of fsdp")
MICRO = ("micro_batch", {"size": 2})


@pytest.mark.slow
def test_every_way_to_share_out_samples(pool):
    cases = [("labels", strategy) for strategy in SPLIT_BY_DATA.values()]
    cases += [(name, SPLIT_BY_DATA[way]) for way in IN_PARTS for name in ("sum", "causal")]
    cases += [(name, ["ddp"]) for name in loss_job.LOSSES]
    assert_trains_like_plain(
        pool, loss_job.deviation, [*cases, ("sum", ["zero1"]), ("causal", ["fsdp"]), ("sum", ["chunk"])]
    )
    meshes = {axis: ("parallel_mode", ([(axis, 2), ("data", 2)], None)) for axis in SPLIT}
    cases = [(name, [meshes[axis], *SPLIT[axis]]) for axis in SPLIT for name in ("sum", "labels")]
    assert_trains_like_plain(pool, loss_job.deviation, cases, ranks=4)
    fp16 = ("amp_native", "fp16")
    # A whole batch's sum overflows at the first loss scale, so that its first step is left out.
    cases = [("sum", ["ddp", fp16, MICRO]), ("labels", ["ddp", fp16]), ("labels", ["ddp", fp16, MICRO])]
    assert_trains_like_plain(pool, loss_job.deviation, cases, band=1e-2)


def test_rows_and_labels_that_differ_between_ranks_and_batches(pool):
    cases = [(name, ["ddp"]) for name in ("labels", "by row")] + [
        (name, ["ddp", MICRO]) for name in ("labels", "causal")
    ]
    assert_trains_like_plain(pool, later, cases)

    assert_trains_like_plain(pool, alone, [(name, ["fsdp"]) for name in ("sum", "labels", "causal")])

    assert_trains_like_plain(pool, ragged, [(name,) for name in ("rows", "sum", "labels", "causal")])

    cases = [(name, ["ddp", *beside]) for name in ("labels", "mask", "causal") for beside in ([], [MICRO])]
    assert_trains_like_plain(pool, without_labels, cases)

    assert max(pool.run(two_losses, ranks=2)) <= EXACT


def later(rank, size, name, strategy):
    return loss_job.deviation(rank, size, name, strategy, full_first=True)


def alone(rank, size, name, strategy):
    return loss_job.deviation(rank, size, name, strategy, batch_size=size)


SPLIT = {
    "tensor": ["tensor_parallel", "ddp"],
    "pipeline": [("pipeline_parallel", {"split_points": ["layers.1"], "micro_batches": 2}), "ddp"],
}


def ragged(rank, size, name):
    """Ranks have another number of rows, in the first step or in a later one."""
    make, loss_func = loss_job.LOSSES[name]
    data = loss_job.Samples()
    errors = []
    for first in ([0, 1, 2, 3], [4, 5]), ([0, 1, 2, 3], [4, 5, 6, 7]):
        result = loss_job.accelerated(make, loss_func)
        for shares in (first, ([8, 9, 10], [11])):
            batches = [loss_job.batch_of(data, *indices) for indices in shares]
            errors.append(loss_job.gradient_error(result, make, loss_func, batches, rank))
    return max(errors)


def without_labels(rank, size, name, strategy):
    """One rank has nothing that counts, in the second step; the loss it prints is 0/0."""
    make, loss_func = loss_job.LOSSES[name]
    data = loss_job.Samples()
    result = loss_job.accelerated(make, loss_func, strategy)
    shares = [loss_job.batch_of(data, 0, 1, 2, 3), loss_job.batch_of(data, 4, 5, 6, 7)]
    errors = [loss_job.gradient_error(result, make, loss_func, shares, rank)]
    shares[1]["labels"][:], shares[1]["mask"][:] = -100, 0.0
    batch = shares[rank]
    printed = float(result.loss_func(batch, result.model(**batch)).detach())
    assert math.isnan(printed) == (rank == 1)
    return max(*errors, loss_job.gradient_error(result, make, loss_func, shares, rank))


def printed(rank, size):
    """The loss is the user's own, whatever becomes of its gradient, and so it is where no gradient is asked for."""
    data = loss_job.Samples()
    result = loss_job.accelerated(loss_job.Net, loss_job.in_a_tuple)
    batch = loss_job.batch_of(data, 2 * rank, 2 * rank + 1)
    with torch.no_grad():
        evaluated = result.loss_func(batch, result.model(**batch))
    loss, other = result.loss_func(batch, result.model(**batch))
    expected = float(loss_job.added_up(batch, loss_job.Net()(**batch)))
    return abs(float(evaluated[0]) - expected), abs(float(loss) - expected), other


def test_what_is_counted_printed_and_compiled(pool):
    for evaluated, loss, other in pool.run(printed, ranks=2):
        assert evaluated <= 1e-5
        assert loss <= 1e-5
        assert other == 1.0

    expected = {"rows": 0, "sum": 0, "tuple": 0, "labels": 1}
    by_name = run_each(pool, sent, [(name,) for name in expected])
    for more, by_rank in zip(expected.values(), by_name, strict=True):
        assert by_rank == [(more, 8.0 * more)] * 2

    for first, *_, last in pool.run(classes, ranks=2):
        assert last == 1, "the reduction of the gradients"
        assert first > 1

    for by_rank in run_each(pool, compiled, [("ddp",), (("chunk", {"budget_bytes": 100_000}),)]):
        for off, num_graphs in by_rank:
            assert off <= EXACT
            assert num_graphs == 1


def sent(rank, size, name):
    """Calls and bytes that the third step, when all has been found out, sends beyond DistributedDataParallel's own."""
    make, loss_func = loss_job.LOSSES[name]
    result = loss_job.accelerated(
        make, loss_func, dataset=loss_job.Samples(), dataloader_args={"batch_size": loss_job.BATCH}
    )
    for batch in result.dataloader:
        with CommCounter() as mine:
            result.step(batch)
    model, data = DistributedDataParallel(make(), gradient_as_bucket_view=True), loss_job.Samples()
    for _ in range(3):
        with CommCounter() as theirs:
            batch = loss_job.batch_of(data, 0, 1)
            loss_job.value(loss_func(batch, model(**batch))).backward()
    totals = [[sum(figures) for figures in zip(*sends.counts.values(), strict=True)] for sends in (mine, theirs)]
    return tuple(one - other for one, other in zip(*totals, strict=True))


def of_classes(batch, output, **how):
    return nn.functional.cross_entropy(output, batch[1], **how)


def classes(rank, size):
    """A class a row, all of which count: a mean over labels that is one over rows."""
    model, x, y = nn.Linear(6, 3), torch.randn(24, 6), torch.arange(24) % 3
    result = accelerate(
        model, ["ddp"], TensorDataset(x, y), of_classes, batch_size=8, prepare_input=lambda data, device: data
    )
    counts = []
    for batch in result.dataloader:
        with CommCounter() as sends:
            result.loss_func(batch, result.model(batch[0])).backward()
        counts.append(sum(count for count, _ in sends.counts.values()))
    return counts


def told(rank, size, loss_weight):
    """What a loss over the whole batch is told, in three steps."""
    with messages() as records:
        result, data = (
            loss_job.accelerated(loss_job.Net, loss_job.contrast, loss_weight=loss_weight),
            loss_job.Samples(),
        )
        for step in range(3):
            batch = loss_job.batch_of(data, *range(4 * rank + 8 * step, 4 * rank + 8 * step + 4))
            result.loss_func(batch, result.model(**batch)).backward()
    return [message for message in records if "averaged over the processes" in message]


def test_losses_over_the_whole_batch_are_told_once(pool):
    first, second = pool.run(told, "auto", ranks=2)
    assert len(first) == 1
    assert second == []
    assert "two parts have" in first[0]
    assert "loss_weight" in first[0]
    assert pool.run(told, "rows", ranks=2) == [[], []]

    assert pool.run(told_of_classes, ranks=2) == [[True], [True]]


def told_of_classes(rank, size):
    """What a mean by class weights is told whose first batch has one class."""
    x, y = torch.randn(16, 6), torch.tensor([0] * 8 + [1, 0, 0, 0] * 2)
    weight = torch.tensor([1.0, 9.0])
    with messages() as records:
        result = accelerate(nn.Linear(6, 2), ["ddp"], None, partial(of_classes, weight=weight))
        for step in range(2):
            rows = slice(8 * step + 4 * rank, 8 * step + 4 * rank + 4)
            result.loss_func((x[rows], y[rows]), result.model(x[rows])).backward()
    return ["a later batch shows" in message for message in records if "averaged over the processes" in message]


def two_losses(rank, size):
    """Two kinds of batches a step, a sum and a mean over labels, as with a generator and its critic."""
    data = loss_job.Samples()

    def either(batch, output):
        return loss_job.by_label(batch, output) if "labels" in batch else loss_job.added_up(batch, output)

    result, worst = loss_job.accelerated(loss_job.Net, either), 0.0
    for step in range(3):
        shares = [loss_job.batch_of(data, *range(8 * step + 4 * i, 8 * step + 4 * i + 4)) for i in range(size)]
        for left_out in ("labels", "y"):
            kind = [{key: each for key, each in share.items() if key != left_out} for share in shares]
            worst = max(worst, loss_job.gradient_error(result, loss_job.Net, either, kind, rank))
    return worst


def compiled(rank, size, beside):
    """The deviation of compiled blocks whose loss is looked at by running the model, and how many graphs there were."""
    torch.compiler.reset()
    counters.clear()
    off = loss_job.deviation(rank, size, "causal", [beside, ("compile", {"backend": "aot_eager"})], verify=False)
    return off, counters["stats"]["unique_graphs"]


@pytest.mark.nightly
@pytest.mark.parametrize("method", SPLIT_BY_DATA)
def test_on_four_ranks(pool, method):
    assert_trains_like_plain(
        pool, loss_job.deviation, [(name, SPLIT_BY_DATA[method]) for name in loss_job.LOSSES], ranks=4
    )
