"""Streams, pinned memory and memory that is really freed: what only a GPU can show of offloading."""

import copy

import pytest
import torch
from torch import Tensor, nn

from atorch.runtime.memory.offload import HostOptimizer
from atorch.runtime.memory.offload_activations import offload_activations

pytestmark = pytest.mark.gpu

WIDTH, ROWS, BLOCKS = 256, 4096, 8


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(BLOCKS))).cuda()


def rows() -> Tensor:
    return torch.randn(ROWS, WIDTH, device="cuda", generator=torch.Generator("cuda").manual_seed(1))


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_states_are_on_the_host_and_training_is_the_same(share: float) -> None:
    plain, twin = network(), network()
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    mine = HostOptimizer(lambda groups: torch.optim.AdamW(groups, lr=1e-3), twin.parameters(), share)
    for _ in range(4):
        for model, optim in ((plain, theirs), (twin, mine)):
            model(rows()).square().mean().backward()
            optim.step()
            optim.zero_grad()
    for got, wanted in zip(twin.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)
    assert {copied.device.type for copied in mine.shadows.values()} == {"cpu"}
    assert all(copied.is_pinned() for copied in mine.shadows.values())
    states = [state["exp_avg"].device.type for state in mine.inner.state.values()]
    assert states.count("cpu") == len(mine.shadows)
    assert all(group["fused"] for group in mine.param_groups)


def test_activations_leave_the_device_and_gradients_are_the_same() -> None:
    plain = network()
    twin = copy.deepcopy(plain)
    offload_activations(twin)
    held, peaks = [], []
    for model in (plain, twin):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        loss = model(rows()).square().sum()
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_allocated() - before)
        torch.cuda.reset_peak_memory_stats()
        loss.backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        del loss
    for got, wanted in zip(twin.parameters(), plain.parameters(), strict=True):
        assert got.grad is not None
        assert wanted.grad is not None
        torch.testing.assert_close(got.grad, wanted.grad, rtol=0, atol=0)
    activation = ROWS * WIDTH * 4
    assert held[0] - held[1] >= (BLOCKS - 2) * activation
    assert peaks[1] < peaks[0] - (BLOCKS - 4) * activation, "two blocks' activations are back at a time"
