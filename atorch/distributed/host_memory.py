"""Host memory that is free on the nodes of a job, held to what its processes are about to take.

A kernel that runs out of memory kills a process without a word, so what will wait in host memory is counted before it
is taken. Free is what the operating system calls available, within the limits of the control group and the process.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterable
from pathlib import Path

from torch import nn
from torch._subclasses import FakeTensor

from atorch.distributed.collectives import gather_objects, nobody_else
from atorch.errors import OutOfBudgetError
from atorch.units import format_bytes

_CGROUP = Path("/sys/fs/cgroup")
_LIMITS = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))
_CACHED = ("inactive_file", "total_inactive_file")  # in memory.stat: pages of files, which the kernel gives up


def free_on_node() -> int:
    """Bytes that processes of this node may take together."""
    import psutil

    found = [int(psutil.virtual_memory().available)]
    for limit, used in _LIMITS:
        try:
            most, taken = (int((_CGROUP / name).read_text()) for name in (limit, used))
            stat = dict(line.split() for line in (_CGROUP / limit).with_name("memory.stat").read_text().splitlines())
        except (OSError, ValueError):  # no such control group, or one without a limit: "max"
            continue
        found.append(most - taken + max(int(stat.get(name, 0)) for name in _CACHED))
    return max(0, min(found))


def free_to_process() -> float:
    """Bytes that this process may take by its own limit of address space."""
    if sys.platform == "win32":
        return float("inf")
    import resource

    import psutil

    most, _ = resource.getrlimit(resource.RLIMIT_AS)
    return float("inf") if most == resource.RLIM_INFINITY else max(0, most - psutil.Process().memory_info().vms)


def is_simulated(modules: Iterable[nn.Module]) -> bool:
    """True if parameters are fake tensors, or other processes fake ones: nothing is taken then."""
    return nobody_else() or any(isinstance(each, FakeTensor) for module in modules for each in module.parameters())


def missing_bytes(num_bytes: float) -> int:
    """Bytes that a node, or a process, is short of where each process takes `num_bytes`; the most, on all processes."""
    every = gather_objects((platform.node(), num_bytes, free_on_node(), free_to_process()))
    short = [taken - own for _, taken, _, own in every]
    for node in {node for node, *_ in every}:
        here = [(taken, free) for name, taken, free, _ in every if name == node]
        short.append(sum(taken for taken, _ in here) - min(free for _, free in here))
    return int(max(0.0, *short))


def need_host_memory(num_bytes: float, what: str, remedy: str) -> None:
    """Check that there is room for `num_bytes` on the host for each process. All call this together.

    Raises:
        OutOfBudgetError: there is not, on some node; on all processes.
    """
    short = missing_bytes(num_bytes)
    if short:
        raise OutOfBudgetError(
            f"{what} takes {format_bytes(num_bytes)} of host memory for a process, and {format_bytes(free_on_node())} "
            f"of this node are free: a node is short of {format_bytes(short)}. {remedy}"
        )
