"""Norms are those of plain training on the whole batch, and gradients of gradients of split parts are named."""

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn import functional as F

from atorch.auto.opt_lib.chunk.trace import trace_pass
from atorch.compat.engines import shard_gradients, shard_states
from atorch.distributed.mesh import Mesh
from atorch.errors import ArgumentError
from atorch.runtime.chunk.chunked import chunk
from atorch.runtime.data_parallel.replicate import replicate
from atorch.runtime.fsdp.groups import arrange, by_block
from atorch.runtime.fsdp.shard import shard
from atorch.runtime.gradients.clip import clip_grad_norm, clip_grads
from atorch.runtime.gradients.gradient_check import farthest, sample_of
from atorch.runtime.sequence_parallel.token_partition import TokenPartition
from atorch.runtime.tensor_parallel.split_forward import fork, gather, reduce, share
from tests.auto.training import run_each
from tests.operations import waited_for
from tests.pool import Pool, on_ranks
from tests.runtime.sharing import BATCH, SEQ, VOCAB, make, sgd, whole


def pair() -> nn.ModuleList:
    """Two layers of one shape, with gradients."""
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(2))
    for layer in layers:
        layer.weight.grad = torch.randn(8, 8)
    return layers


def test_rounding_by_many_layers_counts_less_than_what_is_lost_or_taken_twice() -> None:
    layers = pair()
    sample = sample_of(layers)
    plain = [layer.weight.grad.clone() for layer in layers]
    for place, grad in enumerate(plain):  # across: nothing of it along the sample
        noise, (name, elements) = torch.randn(8, 8), list(sample.items())[place]
        across = noise.reshape(-1)[elements.places]
        across -= (across @ elements.values) / elements.values.square().sum() * elements.values
        across *= 0.8 * elements.values.norm() / across.norm()
        layers[place].weight.grad = grad.reshape(-1).index_add(0, elements.places, across).reshape(8, 8)
        assert name == f"{place}.weight"
    assert farthest(layers, sample)[0] == pytest.approx(0.8, rel=1e-4)
    assert farthest(layers, sample, noise=4.0)[0] == pytest.approx(0.2, rel=1e-4)
    for damaged in ([0.5 * plain[0], plain[1]], [2 * plain[0], plain[1]], [-plain[0], plain[1]], plain[::-1]):
        for layer, grad in zip(layers, damaged, strict=True):
            layer.weight.grad = grad
        assert farthest(layers, sample, noise=4.0)[0] > 0.4, "beyond the band of bf16"


@on_ranks(1)
def test_a_gradient_penalty_of_split_parts_is_named(rank: int, size: int) -> None:
    """Operations that may lie alone between a parameter and the loss."""
    group = dist.group.WORLD
    assert group is not None
    ways: Mapping[str, Callable[[Tensor], Tensor]] = {
        "fork": partial(fork, group=group),
        "reduce": partial(reduce, group=group),
        "share": partial(share, size=1),
        "gather": partial(gather, counts=[3], group=group),
        "tokens": partial(TokenPartition(group).gather, dim=0),
    }
    for way in ways.values():
        x = torch.ones(3, requires_grad=True)
        with pytest.raises(ArgumentError, match=r"create_graph=True.*split over processes.*train with ddp or zero1"):
            torch.autograd.grad(way(x.square()).sum(), x, create_graph=True)


MAX_NORM = 0.1


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens)[:, :-1].reshape(-1, VOCAB), tokens[:, 1:].reshape(-1))


def tokens_of(rank: int = 0, size: int = 1) -> Tensor:
    return torch.randint(0, VOCAB, (BATCH, SEQ), generator=torch.Generator().manual_seed(5)).chunk(size)[rank]


def backward(model: nn.Module, rank: int = 0, size: int = 1, scale: float = 1.0) -> None:
    (loss_of(model, tokens_of(rank, size)) * scale).backward()


def wrapped(kind: str, rank: int, size: int) -> nn.Module:
    model = make("awkward")
    world = dist.group.WORLD
    assert world is not None
    if kind == "ddp":
        return replicate(model, world, torch.device("cpu"))
    if kind == "chunk":
        passed = trace_pass(model, tokens_of(rank, size), loss_of, device_type="cpu")
        chunk(model, passed, 10**9, device=torch.device("cpu"), group=world if size > 1 else None)
        return model
    if kind == "fairscale":
        return shard_gradients(model, shard_states(model.parameters(), sgd, world), world)
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("data",))
    if kind == "hybrid":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "zero"))
    ignored = model.mixer.parameters() if kind == "mixed" else ()
    shard(model, mesh, arrange(model, by_block(model)), ignored=ignored)
    return model


def clipped(rank: int, size: int, kind: str, norm_type: float) -> tuple[float, float, float]:
    """Norm, expected norm, and the largest distance of a clipped gradient from what it should be."""
    model, plain = wrapped(kind, rank, size), make("awkward")
    backward(model, rank, size)
    backward(plain)
    norm = clip_grad_norm(model, MAX_NORM, norm_type)
    expected = nn.utils.clip_grad_norm_(plain.parameters(), MAX_NORM, norm_type)
    if kind == "chunk" and size > 1:  # a share of a gradient is flat: of all together there is the norm
        return float(norm), float(expected), abs(float(clip_grad_norm(model, 1e9, norm_type)) - MAX_NORM)
    distance = 0.0
    for got, want in zip(model.parameters(), plain.parameters(), strict=True):
        assert (want.grad is None) or (got.grad is not None) or kind == "fairscale"
        if got.grad is not None:
            distance = max(distance, (whole(got.grad) - want.grad).abs().max().item())
    return float(norm), float(expected), distance


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        (1, [("chunk", 2.0), ("chunk", math.inf), ("chunk", 1.0)]),
        (2, [("ddp", 1.0), ("fsdp", 2.0), ("fsdp", math.inf), ("mixed", 1.0), ("fairscale", 2.0), ("chunk", 2.0),
             ("chunk", math.inf)]),
        (4, [("hybrid", 2.0)]),
    ],
)  # fmt: skip
def test_the_norm_is_global_and_clips(pool: Pool, ranks: int, cases: list[tuple[str, float]]) -> None:
    for norm, expected, distance in itertools.chain(*run_each(pool, clipped, cases, ranks=ranks)):
        assert expected > MAX_NORM
        assert norm == pytest.approx(expected, rel=1e-5)
        assert distance <= 1e-6


def test_gradients_in_fp64_and_mixed_dtypes_are_clipped() -> None:
    parameter = nn.Parameter(torch.ones(2, dtype=torch.float64))
    parameter.grad = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert float(clip_grads([parameter], 1.0)) == 5.0
    assert torch.allclose(parameter.grad, torch.tensor([0.6, 0.8], dtype=torch.float64), atol=1e-6)
    half, full = nn.Parameter(torch.zeros(4, dtype=torch.float16)), nn.Parameter(torch.zeros(3))
    half.grad, full.grad = torch.full((4,), 60000.0, dtype=torch.float16), torch.full((3,), 100.0)
    norm = clip_grads([half, full, half], 1.0)
    assert float(norm) == pytest.approx(math.sqrt(4 * 6e4**2 + 3e4))
    assert full.grad.tolist() == pytest.approx([100.0 / float(norm)] * 3)


@dataclass
class Bound:
    """What is known about an accelerated model."""

    mesh: Mesh | None
    scale: float
    layout: None = None

    def loss_scale(self) -> float:
        return self.scale


def bind(model: nn.Module, mesh: Mesh | None, scale: float) -> nn.Module:
    object.__setattr__(model, "_atorch", Bound(mesh, scale))
    return model


def test_scaled_gradients_have_the_true_norm_and_small_ones_are_left_alone() -> None:
    plain, scaled = make("awkward"), bind(make("awkward"), None, 1024.0)
    backward(plain)
    backward(scaled, scale=1024.0)
    expected = nn.utils.clip_grad_norm_(plain.parameters(), MAX_NORM)
    assert float(clip_grad_norm(scaled, MAX_NORM)) == pytest.approx(float(expected), rel=1e-5)
    torch.testing.assert_close(scaled.mixer.weight.grad, 1024.0 * plain.mixer.weight.grad)
    model = make("awkward")
    backward(model)
    before = model.mixer.weight.grad.clone()
    norm = clip_grad_norm(model, 1e6)
    assert norm.dim() == 0
    assert torch.equal(model.mixer.weight.grad, before)


def test_gradients_in_host_memory_wait_for_the_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with FakeTensorMode(allow_non_fake_inputs=True):
        parameters = [nn.Parameter(torch.empty(4, device=device)) for device in ("cuda", "cpu")]
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        assert waited_for(lambda: clip_grads(parameters, 1.0)) == [True]


NET = nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        *[((NET, 1.0, norm), "norm_type; it is a number above 0") for norm in (0.0, -1.0, math.nan, "2")],
        *[((NET, norm), "max_norm; it is a number above 0") for norm in (0.0, -1.0, math.nan, "1", None, True)],
        ((NET, torch.optim.SGD(NET.parameters(), 0.1)), "given SGD .* as max_norm"),
        ((NET, 1.0, torch.optim.SGD(NET.parameters(), 0.1)), "given SGD .* as norm_type"),
        ((NET.parameters(), 1.0), "a generator, .* give the model itself"),
        ((mock.Mock(model=NET), 1.0), "result.model"),
    ],
)
def test_what_does_not_hold_is_refused(given: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=f"(?s){message}"):
        clip_grad_norm(*given)


@pytest.mark.parametrize(
    ("max_norm", "norm_type"),
    [(1, "inf"), (np.float32(1.0), 2), (torch.tensor(1.0), "inf"), (math.inf, 2), (1.0, 2.0), (1.0, math.inf)],
)
def test_numbers_of_any_kind_hold_and_no_gradient_is_norm_zero(max_norm: Any, norm_type: Any) -> None:
    assert float(clip_grad_norm(NET, max_norm, norm_type)) == 0.0


@pytest.mark.parametrize(("norm_type", "expected"), [(2.0, 5.0), (math.inf, 4.0)])
@on_ranks()
def test_pipeline_stages_add_up(rank: int, size: int, norm_type: float, expected: float) -> None:
    model = bind(nn.Linear(2, 1, bias=False), Mesh((("pipeline", 2),), None, "cpu"), 1.0)
    gradient = torch.tensor([[3.0, 0.0]]) if rank == 0 else torch.tensor([[0.0, 4.0]])
    model.weight.grad = gradient.clone()
    assert float(clip_grad_norm(model, 1.0, norm_type)) == pytest.approx(expected)
    assert torch.allclose(model.weight.grad, gradient / expected, atol=1e-5)


@on_ranks()
def test_partial_gradients_are_summed_and_a_rank_without_a_shard_takes_part(rank: int, size: int) -> None:
    mesh = init_device_mesh("cpu", (size,))
    weight = nn.Parameter(DTensor.from_local(torch.zeros(2), mesh, [Replicate()]))
    weight.grad = DTensor.from_local(torch.tensor([3.0, 4.0]) / size, mesh, [Partial()])
    norm = clip_grads([weight], 1.0)
    assert float(norm) == pytest.approx(5.0)
    assert weight.grad.to_local().tolist() == pytest.approx([0.6, 0.8], abs=1e-5)
    mesh = init_device_mesh("cpu", (size,))
    model = nn.Linear(1, 1)  # one row: one rank has nothing
    shard(model, mesh, [])
    model(torch.ones(1, 1)).sum().backward()
    assert float(clip_grad_norm(model, 1.0, math.inf)) == 1.0
