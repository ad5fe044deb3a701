"""The host steps with this process's share of the cores where a launcher has left it one thread."""

from __future__ import annotations

import logging
import os

import pytest
import torch

from atorch.runtime.memory.host_threads import host_threads, tell_threads

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


@pytest.mark.parametrize(
    ("device", "cores", "processes", "before", "inside"),
    [(CUDA, 64, 8, 1, 8), (CUDA, 4, 8, 1, 1), (CUDA, 64, 8, 3, 3), (CPU, 64, 8, 1, 1)],
)
def test_a_share_of_the_cores_while_the_host_steps(
    device: torch.device,
    cores: int,
    processes: int,
    before: int,
    inside: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    had, seen = torch.get_num_threads(), []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    torch.set_num_threads(before)
    try:
        with caplog.at_level(logging.INFO, "atorch"):
            tell_threads(device)
        with host_threads(device):
            seen.append(torch.get_num_threads())
        seen.append(torch.get_num_threads())
    finally:
        torch.set_num_threads(had)
    assert seen == [inside, before]
    assert ("the host steps with 8 threads" in caplog.text) == (inside > before)
