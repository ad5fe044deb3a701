"""Chunks on a CUDA device: what comes over the link is computed with, and the allocator sees the budget kept."""

import copy
import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from atorch.auto.opt_lib.chunk import kept_by_products
from atorch.auto.opt_lib.chunk.trace import trace_pass
from atorch.model.structure import repeated_blocks
from atorch.runtime.chunk.chunk_optimizer import ChunkOptimizer
from atorch.runtime.chunk.chunked import chunk

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

WIDTH, BLOCKS, ROWS = 1024, 8, 256
WORKSPACE_BYTES = 72 * 2**20  # cuBLAS keeps as much for good; no fake tensor shows it


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(BLOCKS)))


def rows(step: int = 0) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def autocast_loss(model: nn.Module, batch: Tensor) -> Tensor:
    with torch.autocast("cuda", torch.bfloat16):
        return model(batch).float().square().mean()


def adam(groups: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=1e-3, fused=True)


def losses(model: nn.Module, optimizer: torch.optim.Optimizer, loss_of: Any = loss_of) -> list[float]:
    found = []
    for step in range(4):
        loss = loss_of(model, rows(step).cuda())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def in_chunks(
    share: float, is_compiled: bool = False, batch: Tensor | None = None, loss_of: Any = loss_of, **how: Any
) -> tuple[nn.Module, ChunkOptimizer, int]:
    """A model with room for a share of its parameters; its budget."""
    model = network()
    compiled = list(repeated_blocks(model)) if is_compiled else []
    accesses = trace_pass(model, rows() if batch is None else batch, loss_of, device_type="cuda", compiled=compiled)
    parameters = sum(parameter.nbytes for parameter in model.parameters())
    budget = max(access.other_bytes for access in accesses.accesses) + int(share * parameters)
    operations = chunk(model, accesses, budget, device=torch.device("cuda"), compiled=compiled, **how)
    for name in compiled:
        model.get_submodule(name).compile()
    return model, ChunkOptimizer(adam, model.parameters(), operations.chunks), budget


def assert_trains_alike(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    plain = network().cuda()
    assert losses(model, optimizer) == pytest.approx(losses(plain, adam(plain.parameters())), rel=1e-4)
    trained = model.state_dict()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(trained[name].cpu(), parameter.detach().cpu(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("prefetch", [0, 4])
@pytest.mark.parametrize("share", [0.3, 1.0])
def test_it_trains_as_plain_training_does(share: float, prefetch: int) -> None:
    model, optimizer, _ = in_chunks(share, prefetch=prefetch)
    assert_trains_alike(model, optimizer)


def test_chunks_that_stay_are_stepped_on_the_device() -> None:
    model, optimizer, _ = in_chunks(3.0, state_bytes=8.0)
    assert_trains_alike(model, optimizer)


def test_compiled_blocks() -> None:
    model, optimizer, _ = in_chunks(0.5, is_compiled=True)
    assert_trains_alike(model, optimizer)


@pytest.mark.parametrize("loss_of", [loss_of, autocast_loss])
def test_the_allocator_never_holds_more_than_the_budget(loss_of: Any) -> None:
    """Under autocast operations keep what they were cast to, but for norms."""
    plain = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    losses(network().cuda(), plain, loss_of)  # what libraries keep for good
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    model, optimizer, budget = in_chunks(0.3, loss_of=loss_of)
    losses(model, optimizer, loss_of)
    assert torch.cuda.max_memory_allocated() - before <= budget


def test_a_device_of_the_budget_s_size_is_enough() -> None:
    model, optimizer, budget = in_chunks(0.3)
    losses(model, optimizer)  # what libraries keep for good
    torch.cuda.empty_cache()
    whole = torch.cuda.get_device_properties(0).total_memory
    allowed = torch.cuda.memory_allocated() + budget + WORKSPACE_BYTES
    torch.cuda.set_per_process_memory_fraction(allowed / whole)
    try:
        assert all(map(math.isfinite, losses(model, optimizer)))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_what_products_keep_is_known_beforehand() -> None:
    """Products of any size and type, forward and backward, keep no more than was measured."""
    kept = kept_by_products(torch.device("cuda", 0))
    assert kept == kept_by_products(torch.device("cuda", 0))
    before = torch.cuda.memory_allocated() - kept
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        model = nn.Linear(WIDTH, WIDTH, device="cuda", dtype=dtype)
        model(torch.ones(ROWS, WIDTH, device="cuda", dtype=dtype)).sum().backward()
        del model
    assert torch.cuda.memory_allocated() - before <= kept


def test_batches_of_other_lengths() -> None:
    model, optimizer, _ = in_chunks(0.3)
    plain = network().cuda()
    theirs = adam(plain.parameters())
    for step, num in enumerate((ROWS, ROWS // 2, 2 * ROWS, ROWS)):
        batch = rows(step).repeat(2, 1)[:num].cuda()
        of_each = []
        for trained, steps in ((model, optimizer), (plain, theirs)):
            loss = loss_of(trained, batch)
            loss.backward()
            steps.step()
            steps.zero_grad()
            of_each.append(loss.item())
        assert of_each[0] == pytest.approx(of_each[1], rel=1e-4)


def test_an_optimizer_that_is_not_fused() -> None:
    model = network()
    accesses = trace_pass(model, rows(), loss_of, device_type="cuda")
    parameters = sum(parameter.nbytes for parameter in model.parameters())
    budget = max(access.other_bytes for access in accesses.accesses) + 2 * parameters
    chunks = chunk(model, accesses, budget, device=torch.device("cuda"), state_bytes=8.0).chunks
    optimizer = ChunkOptimizer(lambda groups: torch.optim.AdamW(groups, lr=1e-3), model.parameters(), chunks)
    assert_trains_alike(model, optimizer)


def test_what_was_saved_goes_on() -> None:
    model, optimizer, _ = in_chunks(0.3)
    losses(model, optimizer)
    weights = {name: tensor.cpu().clone() for name, tensor in model.state_dict().items()}
    states = copy.deepcopy(optimizer.state_dict())  # they are stepped in place
    expected = losses(model, optimizer)
    again, theirs, _ = in_chunks(0.3)
    again.load_state_dict(weights)
    theirs.load_state_dict(states)
    assert losses(again, theirs) == pytest.approx(expected, rel=1e-5)
