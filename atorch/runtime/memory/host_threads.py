"""Threads for the host's computations on behalf of a device."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from atorch.distributed.world import local_world_size
from atorch.logs import logger


def share_of_cores() -> int:
    """This process's cores, divided by the processes that the launcher started on the machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // local_world_size())


def tell_threads(device: torch.device) -> None:
    """Log the number of threads that step on the host for `device`, if the process has fewer."""
    threads = share_of_cores()
    if device.type != "cpu" and torch.get_num_threads() == 1 < threads:
        logger.info(
            "the host steps with %d threads, its share of the cores; OMP_NUM_THREADS=1, as torchrun sets it, would "
            "leave one, and any other number is kept",
            threads,
        )


@contextmanager
def host_threads(device: torch.device) -> Iterator[None]:
    """Inside, the host uses this process's share of the cores for `device`, if torch has only one thread.

    torchrun sets OMP_NUM_THREADS to 1 unless it is set already. Steps of a CPU device keep their number of threads.
    """
    before = torch.get_num_threads()
    if device.type == "cpu" or before > 1:
        yield
        return
    torch.set_num_threads(share_of_cores())
    try:
        yield
    finally:
        torch.set_num_threads(before)
