"""Parameters in chunks, touched in every way that users touch parameters."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from atorch.auto.opt_lib.chunk.trace import trace_pass
from atorch.errors import ArgumentError
from atorch.runtime.chunk.chunk_optimizer import ChunkOptimizer
from atorch.runtime.chunk.chunked import chunk
from atorch.runtime.chunk.operations import Operations
from tests.pool import Pool
from tests.runtime.chunk import test_training as training
from tests.runtime.chunk.test_training import CPU, adam, fresh, of_logits, tokens, train
from tests.runtime.sharing import Awkward


def in_chunks(
    make: Callable[[], nn.Module] = Awkward,
    loss: Callable[[nn.Module, Tensor], Tensor] = of_logits,
    share: float = 0.25,
    **how: Any,
) -> tuple[nn.Module, Operations, ChunkOptimizer]:
    """A model of whose parameters this share fits beside its activations."""
    model, optimizer, operations, _ = training.in_chunks((make, tokens, loss), share, **how)
    return model, operations, optimizer


@pytest.fixture
def model() -> nn.Module:
    return in_chunks()[0]


def test_values_can_be_looked_at_and_copied_outside_of_a_pass(model: nn.Module) -> None:
    plain = fresh(Awkward)
    weight, expected = model.tokens.weight, plain.tokens.weight
    assert torch.equal(weight.norm(), expected.norm()), "with gradients recorded"
    with torch.no_grad():
        assert torch.equal(weight.norm(), expected.norm())
        assert torch.equal(weight.data, expected.data)
    assert torch.equal(weight.detach(), expected)
    assert (weight.shape, weight.dtype, weight.device) == (expected.shape, expected.dtype, expected.device)
    assert repr(weight.detach()) == repr(expected.detach())
    assert "nan" not in repr(weight)
    with torch.no_grad():
        model.blocks[1].up.weight.copy_(model.blocks[0].up.weight)
    model.blocks[1].up.bias.data = model.blocks[0].up.bias
    assert torch.equal(model.blocks[1].up.weight.detach(), model.blocks[0].up.weight.detach())
    assert torch.equal(model.blocks[1].up.bias.detach(), model.blocks[0].up.bias.detach())


def test_what_is_said_without_values_brings_nothing() -> None:
    model, operations, _ = in_chunks()
    with operations.forward():
        before = operations.residency.fetched_bytes
        for parameter in model.parameters():
            _ = parameter.shape, parameter.dtype, parameter.stride(), parameter.is_contiguous(), parameter.dim_order()
            _ = parameter.is_conj(), parameter.is_neg(), parameter.is_inference(), parameter.is_shared()
        assert operations.residency.fetched_bytes == before


def test_what_is_written_outside_of_a_pass_is_computed_with() -> None:
    (model, _, _), plain = in_chunks(), fresh(Awkward)
    for each in (model, plain):
        with torch.no_grad():
            each.mixer.weight.mul_(0.5)
            each.tokens.weight.copy_(each.tokens.weight * 2)
        each.mixer.bias.data.fill_(0.25)
        each.scale.data = torch.tensor(3.0)
        nn.init.ones_(each.blocks[1].norm.weight)
    assert torch.equal(model(tokens(0)), plain(tokens(0)))


def test_a_view_of_data_that_is_replaced_is_refused(model: nn.Module) -> None:
    row = model.mixer.weight.data[1]
    before = row.clone()
    with pytest.raises(ArgumentError, match=r"mixer\.weight\.data was assigned while a view .* Keep `parameter"):
        model.mixer.weight.data = torch.zeros_like(model.mixer.weight)
    assert torch.equal(row, before)
    del row
    model.mixer.weight.data = torch.zeros_like(model.mixer.weight)
    assert not model.mixer.weight.data.any()


def decay_first(model: nn.Module, batch: Tensor) -> Tensor:
    decay = sum(each.square().sum() for each in model.parameters() if each.requires_grad)
    return of_logits(model, batch) + 0.01 * decay


def by_parts(model: nn.Module, batch: Tensor) -> Tensor:
    logits = F.linear(model.blocks[0](model.tokens(batch)), model.tokens.weight)
    return F.cross_entropy(logits.flatten(0, 1), batch.flatten())


def beside_plain(rank: int, size: int, loss: Callable[[nn.Module, Tensor], Tensor]) -> list[list[float]]:
    """Losses in chunks, and without; all processes have the same batches."""
    reference = fresh(Awkward)
    model, _, optimizer = in_chunks(share=1.0, group=dist.group.WORLD if size > 1 else None)
    expected = train(reference, adam(reference.parameters()), tokens, loss)
    return [train(model, optimizer, tokens, loss), expected]


@pytest.mark.parametrize(("loss", "size"), [(decay_first, 2), (by_parts, 1), (by_parts, 2)])
def test_outside_of_the_pass_weights_are_those_of_the_last_step(
    pool: Pool, loss: Callable[[nn.Module, Tensor], Tensor], size: int
) -> None:
    for found, expected in [beside_plain(0, 1, loss)] if size == 1 else pool.run(beside_plain, loss):
        assert found == pytest.approx(expected, rel=1e-6)


class Clamped(Awkward):
    """Its forward pass writes a weight."""

    def forward(self, batch: Tensor) -> Tensor:
        with torch.no_grad():
            self.mixer.weight.clamp_(-0.1, 0.1)
        return super().forward(batch)


def of_both(model: nn.Module, batch: Tensor) -> Tensor:
    """Two forward passes before one backward."""
    return of_logits(model, batch) + of_logits(model, batch.flip(0))


@pytest.mark.parametrize(("make", "loss"), [(Clamped, of_logits), (Awkward, of_both)])
def test_the_same_bits_where_forward_writes_or_runs_twice(make: Callable[[], nn.Module], loss: Any) -> None:
    reference, (model, _, optimizer) = fresh(make), in_chunks(make, loss)
    expected = train(reference, adam(reference.parameters()), tokens, loss)
    assert train(model, optimizer, tokens, loss) == expected


def test_gradients_are_seen_changed_and_cleared(model: nn.Module) -> None:
    plain = fresh(Awkward)
    for each in (model, plain):
        of_logits(each, tokens(0)).backward()
    for name, parameter in model.named_parameters():
        expected = plain.get_parameter(name).grad
        assert (parameter.grad is None) == (expected is None)
        assert expected is None or torch.equal(parameter.grad, expected), name
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    assert torch.allclose(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1), norm)
    assert torch.allclose(model.mixer.weight.grad, plain.mixer.weight.grad)
    model.mixer.weight.grad = None
    assert model.mixer.weight.grad is None
    model.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_copy_is_an_ordinary_model_of_its_own(model: nn.Module) -> None:
    twin = copy.deepcopy(model)
    assert all(type(parameter) is nn.Parameter for parameter in twin.parameters())
    assert twin.blocks[2].up.weight is twin.blocks[0].up.weight, "tied parameters stay tied"
    expected = model(tokens(0))
    with torch.no_grad():
        twin.mixer.weight.zero_()
    assert torch.equal(model(tokens(0)), expected)
    of_logits(twin, tokens(0)).backward()
    assert twin.mixer.bias.grad is not None
    assert model.mixer.bias.grad is None


def test_a_pass_that_raises_leaves_the_next_one_right() -> None:
    class Stumbling(Awkward):
        stumbles = False

        def forward(self, batch: Tensor) -> Tensor:
            logits = super().forward(batch)
            if self.stumbles:
                raise ValueError("stumbled")
            return logits

    (model, operations, _), plain = in_chunks(Stumbling), fresh(Stumbling)
    model.stumbles = True
    with pytest.raises(ValueError, match="stumbled"):
        model(tokens(0))
    model.stumbles = False
    assert torch.equal(model(tokens(0)), plain(tokens(0)))
    assert operations.residency.pass_schedule.on_schedule


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(40, 8, sparse=True), nn.Linear(8, 40)

    def forward(self, batch: Tensor) -> Tensor:
        return self.head(self.table(batch))


class Peculiar(nn.Parameter):
    """A parameter of a class of its own."""


def test_what_chunks_cannot_hold_is_refused_by_name(model: nn.Module) -> None:
    with pytest.raises(ArgumentError, match=r"cast and resize before the chunks are made"):
        model.half()
    with pytest.raises(ArgumentError, match=r"table\.weight has a sparse gradient"):
        of_logits(in_chunks(Sparse, share=1.0)[0], tokens(0)).backward()
    plain = fresh(Awkward)
    accesses = trace_pass(plain, tokens(0), of_logits, device_type="cpu")
    plain.scale = Peculiar(torch.tensor(1.5))
    with pytest.raises(ArgumentError, match="scale is a Peculiar"):
        chunk(plain, accesses, 10**9, device=CPU)
    assert of_logits(plain, tokens(0)).isfinite()
