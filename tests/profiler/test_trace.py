"""Counts against closed forms, on models that are left bit for bit as they were."""

import copy
import random
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from atorch.cost import plain_cost
from atorch.cost.kernels import optimizer_bytes
from atorch.errors import ArgumentError
from atorch.profiler.trace import optimizer_state_per_param, trace
from tests.language_models import llama
from tests.profiler.totals import total


def call(model, batch):
    return model(batch)


def mean(batch, output):
    return output.float().mean()


def mlp(dims=(16, 64, 8), **kwargs):
    return nn.Sequential(nn.Linear(dims[0], dims[1], **kwargs), nn.ReLU(), nn.Linear(dims[1], dims[2], **kwargs))


def test_mlp_counts_are_the_closed_forms():
    profile = trace(mlp(), torch.randn(32, 16), call, mean)
    assert profile.num_params == profile.num_trainable == 16 * 64 + 64 + 64 * 8 + 8
    assert profile.param_bytes == 4 * profile.num_params
    assert total(profile, "matmul_flops") == 2 * 32 * (16 * 64 + 64 * 8)
    assert total(profile, "attention_flops") == 0
    # The input, for the first weight's gradient, and ReLU's output, which the second layer needs as well.
    assert total(profile, "saved_bytes") == 4 * 32 * (16 + 64)
    assert total(profile, "traffic_bytes") == 4 * (32 * 64 * 2 + 32 * 8 + 1)  # ReLU in and out; mean in and out
    assert total(profile, "num_ops") == 6  # two addmm, each of a weight that is looked at transposed, relu, mean
    assert profile.batch_size == 32
    assert profile.segments[0].working_bytes == 2 * 4 * 32 * 64  # ReLU's gradients, of what it gave and was given
    assert profile.traced
    assert profile.blocks == ()
    assert profile.module_classes == {"Sequential", "Linear", "ReLU"}


def test_parameters_are_counted_once_and_products_as_often_as_they_run():
    model = mlp()
    model[0].requires_grad_(False)
    profile = trace(model, torch.randn(32, 16), call, mean)
    assert profile.num_trainable == 64 * 8 + 8
    assert total(profile, "saved_bytes") == 4 * 32 * 64  # ReLU of what needs no gradient saves nothing

    model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 50, bias=False))
    model[1].weight = model[0].weight
    profile = trace(model, torch.randint(0, 50, (2, 5)), call, mean)
    assert profile.num_params == 50 * 8
    assert total(profile, "matmul_flops") == 2 * 10 * 8 * 50

    layer, inputs = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), torch.randn(2, 3, 8)
    twice, single = (trace(nn.Sequential(*[layer] * times), inputs, call, mean) for times in (2, 1))
    assert twice.num_params == single.num_params
    assert total(twice, "matmul_flops") == 2 * total(single, "matmul_flops")

    batch = {"left": torch.randn(3, 4), "right": torch.randn(3, 4)}
    profile = trace(Named(), batch, lambda m, b: m(**b), lambda b, output: output["sum"].sum())
    assert total(profile, "matmul_flops") == 2 * 3 * 16


def test_tiny_llama_counts_are_the_closed_forms():
    hidden, ffn, vocab, layers, batch, seq = 64, 128, 100, 3, 2, 16
    with torch.device("meta"):
        model = llama(vocab, hidden, ffn, layers, 4, 4)
    tokens = torch.randint(0, vocab, (batch, seq))
    profile = trace(model, {"input_ids": tokens, "labels": tokens}, lambda m, b: m(**b), lambda b, output: output.loss)
    per_layer = 4 * hidden * hidden + 3 * hidden * ffn
    assert profile.num_params == layers * (per_layer + 2 * hidden) + 2 * vocab * hidden + hidden
    assert total(profile, "matmul_flops") == 2 * batch * seq * (layers * per_layer + vocab * hidden)
    assert total(profile, "attention_flops") == layers * 4 * batch * seq * seq * hidden / 2  # causal
    start, block, end = profile.segments
    assert (block.name, block.count) == ("model.layers.0", layers)
    assert block.num_params == per_layer + 2 * hidden
    assert block.matmul_flops == 2 * batch * seq * per_layer
    assert block.input_bytes == end.input_bytes == 4 * batch * seq * hidden  # the hidden states
    assert total(profile, "saved_bytes") == layers * block.saved_bytes + start.saved_bytes + end.saved_bytes
    assert model.model.layers[0].mlp.up_proj.weight.is_meta
    assert not any(block._forward_hooks or block._forward_pre_hooks for block in model.model.layers)


class Stateful(nn.Module):
    """BatchNorm, a non-persistent buffer that forward writes, a plain tensor attribute, dropout and a counter."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5)
        self.register_buffer("seen", torch.zeros(4), persistent=False)
        self.scale = torch.ones(4, 1, 1)
        self.calls = 0

    def forward(self, images):
        self.calls += 1
        features = self.drop(self.norm(self.conv(images)))
        self.seen += features.detach().mean((0, 2, 3))
        self.scale.mul_(2)
        return features * self.scale


def test_model_and_random_states_are_untouched():
    model = Stateful()
    before = copy.deepcopy(model)
    torch_state, numpy_state, python_state = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    profile = trace(model, torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1)), call, mean)
    assert profile.traced
    assert total(profile, "matmul_flops") == 2 * 2 * 4 * 6 * 6 * 3 * 9
    for name, tensor in before.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name])
    assert torch.equal(model.seen, before.seen)
    assert torch.equal(model.scale, before.scale)
    assert model.calls == 0
    assert not any(p.grad is not None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert np.array_equal(np.random.get_state()[1], numpy_state)
    assert random.getstate() == python_state


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, inputs):
        features = self.norm(inputs)
        return self.left(features) if features.sum() > 0 else self.right(features)


def test_data_dependent_flow_runs_for_real_on_a_copy():
    model = Branching()
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    profile = trace(model, torch.ones(8, 4), call, mean)
    assert not profile.traced
    assert total(profile, "matmul_flops") == 2 * 8 * 4 * 4
    assert profile.num_params == 2 * (16 + 4) + 8
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in before.items())
    assert torch.equal(torch.get_rng_state(), state)


def test_what_cannot_be_traced_is_told_and_faults_of_the_user_come_through():
    with torch.device("meta"):
        model = Branching()
    with pytest.raises(ArgumentError, match="meta device"):
        trace(model, torch.ones(8, 4), call, mean)
    with pytest.raises(ArgumentError, match="no parameters"):
        trace(nn.ReLU(), torch.randn(2, 2), call, mean)
    with pytest.raises(RuntimeError, match="shapes"):
        trace(mlp(), torch.randn(32, 17), call, mean)


class Named(nn.Module):
    """Two inputs, a dict as output."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4, bias=False)

    def forward(self, left, right):
        return {"sum": self.inner(left) + right, "left": left}


def needs_two_parameters(params):
    assert len(params) == 2


@pytest.mark.parametrize(
    ("make", "state"),
    [
        (torch.optim.AdamW, 2.0),
        (lambda params: torch.optim.SGD(params, lr=0.1), 0.0),
        (lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9), 1.0),
        (torch.optim.LBFGS, 2.0),  # cannot step without a closure
        (needs_two_parameters, 2.0),
    ],
)
def test_optimizer_state(make, state):
    assert optimizer_state_per_param(make) == state


@pytest.mark.parametrize(
    ("make", "traffic", "temporaries"),
    [
        (partial(torch.optim.AdamW, fused=True), 1.0, False),
        (torch.optim.AdamW, 0.89 * 20 / 7, True),  # 28 bytes and 20 passes of 4
        (partial(torch.optim.AdamW, foreach=True), 0.89 * 20 / 7, True),
        (partial(torch.optim.SGD, lr=0.1), 1.0, False),
        (partial(torch.optim.SGD, lr=0.1, momentum=0.9), 0.89 * 8 / 5, False),
        (torch.optim.LBFGS, 1.0, True),
    ],
)
def test_what_a_step_of_the_optimizer_moves(make, traffic, temporaries):
    """One kernel reads and writes everything once; operations over lists do so for each of their steps."""
    profile = trace(nn.Linear(4, 4), torch.ones(2, 4), call, mean, make)
    assert profile.optim_traffic == pytest.approx(traffic)
    assert profile.optim_temporaries == temporaries
    cost = plain_cost(profile)
    moved = 2.0 * (4.0 + cost.optim_itemsize) + 4.0
    assert optimizer_bytes(cost) == pytest.approx(traffic * moved)
    assert (cost.step_itemsize > 0) == (temporaries and cost.optim_itemsize >= 8.0)


class Transformed(nn.Module):
    """A model that is transformed in its forward pass."""

    def __init__(self, transformed):
        super().__init__()
        self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)])
        self.transformed = transformed

    def forward(self, x):
        return self.transformed(self.blocks, x)


def gradient(net, x):
    return torch.func.vmap(torch.func.grad(lambda row: net(row).square().sum()))(x)


@pytest.mark.parametrize(
    "transformed",
    [
        lambda net, x: torch.func.jvp(net, (x,), (torch.ones_like(x),))[1],
        lambda net, x: torch.func.vmap(net)(x),
        lambda net, x: torch.func.vmap(torch.func.jacfwd(net))(x),
    ],
)
def test_what_is_inside_of_a_transform_is_seen(transformed):
    profile = trace(Transformed(transformed), torch.randn(8, 4), call, mean)
    assert profile.num_params == 3 * 20
    assert total(profile, "matmul_flops") >= 3 * 2 * 8 * 16


def test_what_does_not_run_while_it_is_recorded_is_taken_for_its_parameters(caplog):
    profile = trace(Transformed(gradient), torch.randn(8, 4), call, mean)
    assert (profile.num_params, total(profile, "matmul_flops"), profile.traced) == (3 * 20, 0, False)
    assert "what the model computes is not known" in caplog.text
    with pytest.raises(ZeroDivisionError):  # of the model itself
        trace(Transformed(lambda net, x: 1 // 0), torch.randn(8, 4), call, mean)
