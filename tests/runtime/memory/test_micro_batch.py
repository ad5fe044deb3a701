"""Micro-batches give the whole batch's loss and gradients, whatever is done with them afterwards."""

import copy
import math
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from atorch.errors import ArgumentError, StrategyError
from atorch.runtime.data_parallel.replicate import replicate
from atorch.runtime.fsdp.groups import FsdpUnit
from atorch.runtime.fsdp.shard import shard
from atorch.runtime.gradients.micro_batched import MicroBatched
from atorch.runtime.precision.amp import LossScale, ScaledOptimizer, scale_loss
from tests.pool import on_ranks
from tests.runtime.tensor_parallel.models import Collectives
from tests.zoo import Residual


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.embed, self.norm, self.head = nn.Embedding(11, 8), nn.LayerNorm(8), nn.Linear(8, 11)
        self.seen = []

    def forward(self, tokens, scale=1.0):
        self.seen.append(len(tokens))
        return self.head(self.norm(torch.tanh(self.embed(tokens)))) * scale


def mse(batch, output):
    return nn.functional.mse_loss(output, batch["y"])


def by_label(batch, output):
    return nn.functional.cross_entropy(output.flatten(0, 1), batch["labels"].flatten())


def make_batch(rows=7, seed=1):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 11, (rows, 5), generator=generator)
    return {"tokens": tokens, "y": torch.randn(rows, 5, 11, generator=generator), "labels": tokens.clone()}


def gradients(model):
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def close(mine, theirs, rtol=1e-6):
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=1e-7)


def micro(loss_func=mse, **knobs):
    model = Net()
    return model, MicroBatched(model, loss_func, **knobs)


def plain_gradients(*batches, weight=1, loss=mse):
    """Of one process that takes whole batches, each divided by a weight."""
    plain = Net()
    for batch in batches:
        (loss(batch, plain(batch["tokens"])) / weight).backward()
    return gradients(plain)


@pytest.mark.parametrize(
    ("knobs", "seen"),
    [
        ({"size": 3}, None),
        ({"count": 20}, None),
        ({}, None),
        ({"size": 3, "loss_weight": "rows"}, [3, 3, 1]),
        ({"count": 3, "loss_weight": "rows"}, [3, 3, 1]),
    ],
)
def test_gradients_are_those_of_the_whole_batch(knobs, seen):
    batch = make_batch()
    model, loss_func = micro(**knobs)
    loss = loss_func(batch, model(batch["tokens"]))
    assert gradients(model) == [None] * 5
    loss.backward()
    torch.testing.assert_close(loss, mse(batch, Net()(batch["tokens"])))
    close(gradients(model), plain_gradients(batch))
    assert seen in (None, model.seen)


def use(model, loss_func, clip):
    """Accumulation over calls, a factor on the loss, clipping, and losses that are added up before backward."""
    optim = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(3):
        for call in range(2):
            batch = make_batch(4 + call, seed=step)
            (loss_func(batch, model(batch["tokens"], scale=2.0)) / 2).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optim.step()
        optim.zero_grad(set_to_none=step == 0)
    first, second = make_batch(3, seed=8), make_batch(5, seed=9)
    (loss_func(first, model(first["tokens"])) + 3 * loss_func(second, model(second["tokens"]))).backward()
    return [p.detach() for p in model.parameters()], gradients(model)


@pytest.mark.parametrize("clip", [False, True])
def test_accumulating_scaling_and_clipping_mean_what_they_mean(clip):
    expected, last = use(Net(), mse, clip)
    weights, mine = use(*micro(size=2), clip)
    close(weights, expected, 1e-5)
    close(mine, last, 1e-5)


class Dividing(Net):
    """A mean over labels, or, as transformers' models, a sum by the number that the loop gives."""

    def forward(self, tokens, labels, num_items_in_batch=None):
        logits, labels = super().forward(tokens).flatten(0, 1), labels.flatten()
        if num_items_in_batch is None:
            return nn.functional.cross_entropy(logits, labels)
        return nn.functional.cross_entropy(logits, labels, reduction="sum") / num_items_in_batch


@pytest.mark.parametrize(
    ("number", "given_at", "in_batch"),
    [(torch.tensor(50), (1, 2), True), (50, (0, 1), False), (50, (2,), True), (torch.tensor(50), (0, 2), False)],
)
def test_a_divisor_that_some_calls_give(number, given_at, in_batch):
    plain, model = Dividing(), Dividing()
    loss_func = MicroBatched(model, lambda batch, output: output, count=2)
    for step in range(3):
        batch = make_batch(7, seed=step)
        batch["labels"][:3, 1:] = -100
        given = {"num_items_in_batch": number} if step in given_at else {}
        arguments = {"tokens": batch["tokens"], "labels": batch["labels"], **given}
        expected = plain(**arguments)
        expected.backward()
        loss = loss_func({**batch, **(given if in_batch else {})}, model(**arguments))
        loss.backward()
        torch.testing.assert_close(loss, expected)
    close(gradients(model), gradients(plain), 1e-5)


def test_looking_for_the_weights_leaves_the_model_as_it_was():
    class Noisy(Net):
        def __init__(self):
            super().__init__()
            self.drop, self.batch_norm = nn.Dropout(0.5), nn.BatchNorm1d(5)

        def forward(self, tokens, scale=1.0):
            return self.batch_norm(self.drop(super().forward(tokens, scale)))

    model = Noisy()
    loss_func = MicroBatched(model, mse, size=4)
    loss_func(make_batch(8), model(make_batch(8)["tokens"]))
    assert all(module.training for module in model.modules())
    assert model.batch_norm.num_batches_tracked == 2


def test_without_gradients_the_model_is_itself_and_copies_share_no_state():
    model, loss_func = micro(size=2)
    batch = make_batch()
    model.eval()
    with torch.no_grad():
        output = model(batch["tokens"])
        assert output.shape == (7, 5, 11)
        assert loss_func(batch, output).item() == pytest.approx(mse(batch, Net()(batch["tokens"])).item())
    assert model.seen == [7]
    model, loss_func = micro(size=2)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        assert twin(make_batch()["tokens"]).shape == (7, 5, 11)
    loss_func(make_batch(), model(make_batch()["tokens"])).backward()
    assert gradients(twin) == [None] * 5


def test_a_loss_function_may_call_the_model_and_give_more():
    model = Net()
    batch = make_batch()

    def consistency(batch, output):
        return nn.functional.mse_loss(output, model(batch["tokens"], scale=2.0))

    expected = consistency(batch, model(batch["tokens"])).item()
    loss_func = MicroBatched(model, consistency, size=2)
    assert loss_func(batch, model(batch["tokens"])).item() == pytest.approx(expected)

    def with_more(batch, output):
        return mse(batch, output), {"logits": output, "rows": len(output), "norm": output.pow(2).mean()}

    batch, plain = make_batch(), Net()
    _, expected = with_more(batch, plain(batch["tokens"]))
    model, loss_func = micro(with_more, size=3)
    loss, more = loss_func(batch, model(batch["tokens"]))
    loss.backward()
    torch.testing.assert_close(more["logits"], expected["logits"].detach())
    torch.testing.assert_close(more["norm"], expected["norm"].detach())
    assert more["rows"] == pytest.approx((3 * 3 + 3 * 3 + 1) / 7)


def test_a_micro_batch_that_raises_leaves_nothing_behind():
    model, loss_func = micro(size=2)
    batch = make_batch()
    loss_func(batch, model(batch["tokens"])).backward()
    before = gradients(model)
    broken = {**batch, "tokens": batch["tokens"].clone()}
    broken["tokens"][5] = 99
    with pytest.raises(IndexError):
        loss_func(broken, model(broken["tokens"]))
    close(gradients(model), before, 0)
    model.zero_grad()
    loss_func(batch, model(batch["tokens"])).backward()
    close(gradients(model), before, 0)


class Hungry(Net):
    """Has memory for so many rows."""

    limit = 3

    def forward(self, tokens, scale=1.0):
        if len(tokens) > self.limit:
            raise torch.OutOfMemoryError("no room")
        return super().forward(tokens, scale)


def hungry(limit):
    model = Hungry()
    model.limit = limit
    loss_func = MicroBatched(model, mse, loss_weight="rows")
    loss_func._trials = 2  # what a machine with an accelerator starts with
    return model, loss_func


def test_the_largest_size_that_fits_is_found():
    batch = make_batch()
    model, loss_func = hungry(3)
    for _ in range(3):
        model.zero_grad()
        model.seen.clear()
        loss_func(batch, model(batch["tokens"])).backward()
        close(gradients(model), plain_gradients(batch))
    assert model.seen == [2, 2, 2, 1]


def counting():
    return Collectives(("c10d", "_c10d_functional"))


def averaged(bytes_sent, bucket):
    """DDP's reduction, noted."""
    bytes_sent.append(bucket.buffer().nbytes)
    buffer = bucket.buffer().div_(dist.get_world_size())
    return dist.all_reduce(buffer, async_op=True).get_future().then(lambda done: done.value()[0])


@pytest.mark.parametrize("kind", ["ddp", "buckets", "fsdp", "each"])
@on_ranks()
def test_gradients_are_reduced_once_a_call_or_as_shards_with_each_micro_batch(rank, size, kind):
    model, plain, bytes_sent = Net(), Net(), []
    if kind in ("fsdp", "each"):
        wrapped = fully_shard(model)
    else:
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=kind == "buckets")
        wrapped.register_comm_hook(bytes_sent, averaged)
    loss_func = MicroBatched(wrapped, mse, size=2, reduce="each" if kind == "each" else "once")
    batch = make_batch(5, seed=rank)
    loss_func(batch, wrapped(batch["tokens"])).backward()
    wrapped.zero_grad()
    bytes_sent.clear()
    with counting() as sent:
        for shift in (0, 10):
            batch = make_batch(5, seed=rank + shift)
            (loss_func(batch, wrapped(batch["tokens"])) / 2).backward()
    pair = [make_batch(4, rank + shift) for shift in (0, 1)]
    sum(loss_func(batch, wrapped(batch["tokens"])) for batch in pair).backward()
    for seeds, rows, weight in (((0, 1, 10, 11), 5, 4), ((0, 1, 1, 2), 4, 2)):
        batches = [make_batch(rows, seed) for seed in seeds]
        (sum(mse(batch, plain(batch["tokens"])) for batch in batches) / weight).backward()
    if kind in ("ddp", "buckets"):
        close(gradients(model), gradients(plain), 1e-5)
        assert sum(bytes_sent) == 4 * sum(p.nbytes for p in plain.parameters())
    else:
        close([p.grad.full_tensor() for p in model.parameters()], gradients(plain), 1e-5)
        calls = sum(sent.counts.get(call, 0) for call in ("_reduce_scatter_base_", "reduce_scatter_tensor"))
        assert calls == (2 if kind == "fsdp" else 2 * 3)  # five rows, two at a time


@on_ranks()
def test_nothing_is_left_unreduced_in_the_users_no_sync(rank, size):
    model = Net()
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    loss_func = MicroBatched(wrapped, mse, size=2)
    for shift, context in ((0, wrapped.no_sync()), (10, nullcontext())):
        batch = make_batch(5, seed=rank + shift)
        with context:
            loss_func(batch, wrapped(batch["tokens"])).backward()
    close(gradients(model), plain_gradients(*(make_batch(5, seed) for seed in (0, 1, 10, 11)), weight=2), 1e-5)


def test_with_a_loss_scale():
    batch, plain = make_batch(), Net()
    mse(batch, plain(batch["tokens"])).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    model, scale = Net(), LossScale(2.0**10)
    loss_func = MicroBatched(model, scale_loss(mse, scale), size=2)
    optim = ScaledOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), scale)
    loss_func(batch, model(batch["tokens"])).backward()
    optim.step()
    close(model.parameters(), plain.parameters())
    optim.zero_grad()
    batch["y"][0, 0, 0] = math.inf
    loss_func(batch, model(batch["tokens"])).backward()
    optim.step()
    assert optim.step_was_skipped
    close(model.parameters(), plain.parameters())


@on_ranks()
def test_fsdp_forgets_what_raised(rank, size):
    def train(broken_first):
        model = Net()
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        fully_shard(model, mp_policy=policy)
        # Of a loss between bf16 and fp32 torch 2.11 has no gradient.
        loss_func = MicroBatched(model, lambda batch, output: mse(batch, output.float()), size=2, loss_weight="rows")
        if broken_first:
            broken = make_batch(4, rank)
            broken["tokens"][3] = 99
            with pytest.raises(IndexError):
                loss_func(broken, model(broken["tokens"]))
        batch = make_batch(4, rank)
        loss_func(batch, model(batch["tokens"])).backward()
        return [p.grad.to_local().clone() for p in model.parameters()]

    close(train(True), train(False), 0)


def asked(model, loss_func, factor=2.0):
    """Gradients of some parameters, in a pass of their own, and of the others by `torch.autograd.grad`."""
    loss = factor * loss_func(make_batch(), model(make_batch()["tokens"]))
    first, *others = model.parameters()
    loss.backward(inputs=[first], retain_graph=True)
    assert [p.grad is None for p in model.parameters()] == [False, True, True, True, True]
    return [first.grad, *torch.autograd.grad(loss, others, retain_graph=True)], loss, [first, *others]


@pytest.mark.parametrize("hooked", [False, True])
def test_gradients_go_to_those_that_are_asked_for(hooked):
    model, loss_func = micro(size=2)
    if hooked:
        model.head.weight.register_hook(lambda gradient: gradient + 0)  # autograd would call it with None
        loss = loss_func(make_batch(), model(make_batch()["tokens"]))
        loss.backward()
        return close(gradients(model), asked(Net(), mse, 1.0)[0])
    mine, loss, parameters = asked(model, loss_func)
    close(mine, asked(Net(), mse)[0])
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward(inputs=parameters, retain_graph=True)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    return None


def contrast(batch, output):
    """It compares rows with one another: no weights of micro-batches make it."""
    features = output.flatten(1)
    return nn.functional.cross_entropy(features @ features.T, torch.arange(len(features)))


def test_what_does_not_hold_is_refused():
    for knobs in ({"size": 0}, {"count": 0}):
        with pytest.raises(ArgumentError, match="at least 1"):
            micro(**knobs)
    model, loss_func = micro(contrast, size=2)
    with pytest.raises(StrategyError, match="loss_weight"):
        loss_func(make_batch(), model(make_batch()["tokens"]))
    model, loss_func = micro(size=2)
    with pytest.raises(ArgumentError, match=r"batch\['tokens'\] has 7 rows there and args\[0\] has 6"):
        loss_func(make_batch(), model(make_batch(6)["tokens"]))
    loss = loss_func(make_batch(), model(make_batch()["tokens"]))
    with pytest.raises(ArgumentError, match=r"create_graph=True.*piece by piece"):
        torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    model, loss_func = hungry(0)
    with pytest.raises(ArgumentError, match="one row"):
        loss_func(make_batch(), model(make_batch()["tokens"]))


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@on_ranks()
def test_gradients_of_one_parameter_over_processes(rank, size, kind):
    model = Net()
    if kind == "fsdp":
        shard(model, init_device_mesh("cpu", (size,)), [FsdpUnit((model.head,))])
    wrapped = model if kind == "fsdp" else replicate(model, dist.group.WORLD, torch.device("cpu"))
    loss_func = MicroBatched(wrapped, mse, size=2)
    parameters = list(model.parameters())
    for _ in range(2):
        model.zero_grad()
        loss = loss_func(make_batch(4, rank), wrapped(make_batch(4, rank)["tokens"]))
        loss.backward(inputs=parameters[3:4])
    has = [each.grad is not None for each in parameters]
    (whole,) = [each.grad.full_tensor() if kind == "fsdp" else each.grad for each in parameters[3:4]]
    loss = loss_func(make_batch(4, rank), wrapped(make_batch(4, rank)["tokens"]))
    with counting() as sent:
        loss.backward()
    expected = plain_gradients(make_batch(4, 0), make_batch(4, 1), weight=2)
    assert (has, sent.counts) == ([False, False, False, True, False], {})
    torch.testing.assert_close(whole.clone(), expected[3])


class Tight(nn.Module):
    """A stack whose third block runs out of memory, in forward or in backward, of more rows than it has room for."""

    def __init__(self, room=99, where="forward"):
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(Residual(nn.Linear(8, 8), nn.Tanh()) for _ in range(5))
        self.register_buffer("count", torch.zeros(()))
        self.room, self.where, self.seen = room, where, []

    def forward(self, x):
        self.seen.append(len(x))
        self.count += 1
        torch.rand(())
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == 2 and len(x) > self.room:
                self.run_out() if self.where == "forward" else x.register_hook(self.run_out)
        return x

    def run_out(self, *_):
        raise torch.OutOfMemoryError("no room")


def tight_batch(rank):
    generator = torch.Generator().manual_seed(rank + 5)
    return {"x": torch.randn(8, 8, generator=generator), "y": torch.randn(8, 8, generator=generator)}


@pytest.mark.parametrize(
    ("where", "kind"), [("forward", "fsdp"), ("backward", "zero2"), ("backward", "each"), ("forward", "compiled")]
)
@on_ranks(timeout=30)
def test_one_rank_that_runs_out_of_memory_leaves_no_other_waiting(rank, size, where, kind):
    """Rank 1 has room for three rows alone."""
    model, plain, graphs = Tight(3 if rank == 1 else 99, where), Tight(), []

    def compiled(graph, _):
        graphs.append(graph)
        return graph.forward

    for block in model.blocks if kind == "compiled" else ():
        block.compile(backend=compiled)
    shard(model, init_device_mesh("cpu", (size,)), [FsdpUnit((block,), keep=kind == "zero2") for block in model.blocks])
    loss_func = MicroBatched(model, mse, loss_weight="rows", reduce="each" if kind == "each" else "once")
    loss_func._trials = 2  # what a machine with an accelerator starts with
    optims = [torch.optim.Adam(each.parameters(), lr=0.01) for each in (model, plain)]
    batches = [tight_batch(number) for number in range(size)]
    torch.manual_seed(3)
    Tight()
    for _ in range(3):
        model.seen.clear()
        loss_func(batches[rank], model(batches[rank]["x"])).backward()
        optims[0].step()
        optims[0].zero_grad()
    assert (model.seen, float(model.count), bool(graphs)) == ([2, 2, 2, 2], 3 * 4, kind == "compiled")
    drawn = torch.rand(())
    torch.manual_seed(3)
    Tight()
    assert drawn == [torch.rand(()) for _ in range(3 * 4 + 1)][-1]
    for _ in range(3):
        (sum(mse(batch, plain(batch["x"])) for batch in batches) / 2).backward()
        optims[1].step()
        optims[1].zero_grad()
    close([p.full_tensor().detach() for p in model.parameters()], [p.detach() for p in plain.parameters()], 1e-5)
