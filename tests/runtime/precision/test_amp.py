"""Autocast in place, loss scaling, and steps that all ranks skip together."""

import copy
import gc
import inspect
import math
import weakref

import pytest
import torch
from torch import nn

from atorch.errors import ArgumentError
from atorch.logs import log_once
from atorch.runtime.precision.amp import LossScale, ScaledOptimizer, autocast_forward, autocast_loss, scale_loss
from tests.pool import on_ranks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor, bias: float = 0.0) -> torch.Tensor:
        """What comes out."""
        return self.down(torch.relu(self.up(x))) + bias

    def twice(self, x: torch.Tensor) -> torch.Tensor:
        return self(x) + self(x)


def mse(batch, output):
    return nn.functional.mse_loss(output, batch)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_forward_runs_under_autocast_and_the_model_stays_itself(dtype):
    model = Net()
    names, signature = list(model.state_dict()), inspect.signature(model.forward)
    x = torch.randn(3, 4)
    with torch.autocast("cpu", dtype):
        expected = model(x)
    autocast_forward(model, "cpu", dtype)
    assert expected.dtype == dtype
    torch.testing.assert_close(model(x), expected.float(), rtol=0, atol=0)
    assert model.forward(x).dtype == model.twice(x).dtype == torch.float32
    assert not torch.is_autocast_enabled("cpu")
    assert list(model.state_dict()) == names
    assert inspect.signature(model.forward) == signature
    assert model.forward.__doc__ == "What comes out."
    assert type(model).__name__ == "Net"
    assert isinstance(model, Net)


def test_a_copy_autocasts_its_own_forward_and_nothing_refers_back_to_the_model():
    model = Net()
    autocast_forward(model, "cpu", torch.bfloat16)
    twin = copy.deepcopy(model)
    x = torch.randn(3, 4)
    with torch.no_grad():
        twin.down.weight.zero_()
        twin.down.bias.fill_(2.0)
    assert (twin(x) == 2).all()
    rounded = model(x)
    assert torch.equal(rounded, rounded.bfloat16().float())
    assert not (rounded == 2).any()
    gone = weakref.ref(model)
    gc.disable()
    try:
        del model, rounded
        assert gone() is None
    finally:
        gc.enable()


def test_a_forward_on_the_instance_and_losses_run_under_autocast():
    model = Net()
    model.forward = lambda x: model.down(model.up(x))
    autocast_forward(model, "cpu", torch.bfloat16)
    rounded = model(torch.randn(3, 4))
    assert torch.equal(rounded, rounded.bfloat16().float())
    loss_func = autocast_loss(nn.functional.cross_entropy, "cpu", torch.float16)
    loss = loss_func(torch.randn(4, 8).half(), torch.tensor([1, 2, 3, 4]))
    assert loss.dtype == torch.float32


@pytest.mark.parametrize("shape", [lambda v: v, lambda v: (v, "more"), lambda v: [v, 3]])
def test_the_scaled_loss_is_the_true_one_with_larger_gradients(shape):
    weight = torch.ones(3, requires_grad=True)
    loss_func = scale_loss(lambda batch, output: shape((output * batch).sum()), LossScale(8.0))
    loss = loss_func(torch.arange(3.0), weight)
    if isinstance(loss, (list, tuple)):
        assert type(loss) is type(shape(None))
        assert loss[1] == shape(None)[1]
        loss = loss[0]
    assert loss.item() == 3.0
    (loss / 2).backward()
    assert weight.grad.tolist() == [0.0, 4.0, 8.0]


def test_the_scale_grows_and_backs_off_as_torchs():
    ours = LossScale(16.0, interval=3)
    theirs = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=3)
    weight = nn.Parameter(torch.ones(2))
    optim = torch.optim.SGD([weight], lr=0.1)
    for good in (True, True, True, True, False, True, True, False, False, True, True, True):
        theirs.scale(torch.ones(()))
        weight.grad = torch.ones(2) if good else torch.tensor([1.0, math.inf])
        theirs.step(optim)
        theirs.update()
        ours.update(skipped=not good)
        assert ours() == theirs.get_scale()


def test_hysteresis_counts_skipped_steps_as_deepspeed_does():
    scale = LossScale(64.0, interval=3, hysteresis=2, smallest=8.0)
    seen = []
    # False skips: the first one is forgiven, those after it are not, until the scale has grown.
    for good in (False, False, False, True, True, True, False, False, False, False, False):
        scale.update(skipped=not good)
        seen.append(scale())
    assert seen == [64, 32, 16, 16, 16, 32, 32, 16, 8, 8, 8]


@pytest.mark.parametrize("smallest", [1.0, 0.0])
def test_a_scale_at_its_smallest_or_below_one_is_told_once(smallest, caplog):
    scale = LossScale(4.0, smallest=smallest)
    for _ in range(5):
        scale.update(skipped=True)
    assert scale() == max(smallest, 4.0 / 2**5)
    assert len(caplog.records) == 1
    assert "NaN" in caplog.text


def test_a_saved_scale_goes_on_where_it_was():
    one, other = (LossScale(64.0, hysteresis=2) for _ in range(2))
    one.update(skipped=True)
    other.load_state_dict(one.state_dict())
    for scale in (one, other):
        scale.update(skipped=True)
        assert scale() == 32.0
    other.load_state_dict({"scale": 8.0, "good_steps": 0})  # as it was saved before there was hysteresis
    other.update(skipped=True)
    assert other() == 8.0


def train(wrap, steps=4):
    torch.manual_seed(1)
    model = Net()
    optim = torch.optim.AdamW(model.parameters(), lr=0.1)
    loss_func = mse
    if wrap:
        scale = LossScale()
        optim, loss_func = ScaledOptimizer(optim, scale), scale_loss(mse, scale)
    scheduler = torch.optim.lr_scheduler.StepLR(optim, 1, gamma=0.5)
    generator = torch.Generator().manual_seed(2)
    for _ in range(steps):
        loss_func(torch.randn(5, 2, generator=generator), model(torch.randn(5, 4, generator=generator))).backward()
        optim.step()
        optim.zero_grad()
        scheduler.step()
    return model, optim


def test_the_wrapper_is_an_optimizer_like_the_inner_one():
    model, optim = train(True)
    assert isinstance(optim, torch.optim.Optimizer)
    assert optim.param_groups is optim.inner.param_groups
    assert optim.param_groups[0]["lr"] == 0.1 / 16
    assert optim.state is optim.inner.state
    extra = nn.Parameter(torch.ones(2))
    optim.add_param_group({"params": [extra], "lr": 0.5})
    assert len(optim.inner.param_groups) == len(optim.param_groups) == 2
    extra.grad = torch.ones(2) * optim.scale()
    optim.step()
    assert extra.tolist() == pytest.approx([0.5 - 0.005] * 2)
    optim.zero_grad()
    assert extra.grad is None


def test_the_state_carries_the_scale():
    _, optim = train(True)
    optim.scale.value, optim.scale.good_steps = 4.0, 7
    _, other = train(True, steps=1)
    other.load_state_dict(optim.state_dict())
    assert (other.scale.value, other.scale.good_steps) == (4.0, 7)
    assert other.param_groups is other.inner.param_groups
    assert other.state is other.inner.state
    steps = [entry["step"].item() for entry in other.state.values()]
    assert steps == [4.0] * 4
    other.load_state_dict(train(False)[1].state_dict())  # of a run without a scale
    assert other.scale.value == 4.0


def test_sparse_gradients_are_added_up_and_a_closure_is_refused():
    embedding = nn.Embedding(4, 2, sparse=True, dtype=torch.float16)
    before = embedding.weight.detach().clone()
    optim = ScaledOptimizer(torch.optim.SGD(embedding.parameters(), lr=0.1), LossScale(2.0))

    def step(value):
        rows, values = torch.tensor([[1, 1]]), torch.full((2, 2), value, dtype=torch.float16)
        embedding.weight.grad = torch.sparse_coo_tensor(rows, values, (4, 2), check_invariants=True)
        optim.step()

    step(40000.0)
    assert optim.step_was_skipped
    step(1.0)
    torch.testing.assert_close(embedding.weight[1], before[1] - 0.2, rtol=1e-2, atol=1e-3)
    optim = ScaledOptimizer(torch.optim.LBFGS([nn.Parameter(torch.ones(2))]), LossScale())
    with pytest.raises(ArgumentError, match="closure"):
        optim.step(lambda: 1.0)


@on_ranks()
def test_an_overflow_in_one_ranks_share_stops_all(rank, size):
    share = nn.Parameter(torch.ones(2))
    optim = ScaledOptimizer(torch.optim.SGD([share], lr=0.1), LossScale())
    share.grad = torch.full((2,), math.inf if rank == 1 else 1.0)
    optim.step()
    assert optim.step_was_skipped
    assert share.tolist() == [1.0, 1.0]


def with_penalty(model, x, loss_func, scale, within):
    """A loss with a gradient penalty over parameters, computed by the loss function or behind it."""

    def penalized(batch, output):
        loss = mse(batch, output)
        found = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        return loss + sum(each.square().sum() for each in found)

    if within:
        return loss_func(penalized)(x, model(x))
    loss = loss_func(mse)(x, model(x))
    found = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    return loss + scale() * sum((each / scale()).square().sum() for each in found)


@pytest.mark.parametrize("within", [True, False])
def test_gradient_penalties_with_a_scale(within, caplog):
    torch.manual_seed(0)
    plain, x = nn.Linear(3, 3), torch.randn(5, 3)
    model, scale = copy.deepcopy(plain), LossScale(2.0**10)
    with_penalty(plain, x, lambda loss_func: loss_func, lambda: 1.0, True).backward()
    log_once.cache_clear()
    with_penalty(model, x, lambda loss_func: scale_loss(loss_func, scale), scale, within).backward()
    assert ("whose gradients fp16 scales" in caplog.text) is not within
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad / scale(), theirs.grad)
