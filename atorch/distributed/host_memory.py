"""Free host memory on the nodes of a job, compared with what its processes are about to allocate.

A kernel that runs out of memory kills a process without a message, so large host allocations are checked beforehand.
Free memory is what the operating system calls available, within the limits of the control group and the process.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterable
from pathlib import Path

from torch import nn
from torch._subclasses import FakeTensor

from atorch.distributed.collectives import gather_objects, is_fake_world
from atorch.errors import OutOfBudgetError
from atorch.units import format_bytes

_CGROUP = Path("/sys/fs/cgroup")
_LIMITS = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))
_CACHED = ("inactive_file", "total_inactive_file")  # in memory.stat: cached pages of files, which can be reclaimed


def free_on_node() -> int:
    """Bytes that the processes of this node may still allocate together."""
    import psutil

    free = [int(psutil.virtual_memory().available)]
    for limit, used in _LIMITS:
        try:
            maximum, usage = (int((_CGROUP / name).read_text()) for name in (limit, used))
            stat = dict(line.split() for line in (_CGROUP / limit).with_name("memory.stat").read_text().splitlines())
        except (OSError, ValueError):  # no such control group, or one without a limit: "max"
            continue
        free.append(maximum - usage + max(int(stat.get(name, 0)) for name in _CACHED))
    return max(0, min(free))


def free_to_process() -> float:
    """Bytes that this process may still allocate within its limit of address space."""
    if sys.platform == "win32":
        return float("inf")
    import resource

    import psutil

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return float("inf") if limit == resource.RLIM_INFINITY else max(0, limit - psutil.Process().memory_info().vms)


def is_simulated(modules: Iterable[nn.Module]) -> bool:
    """True if parameters are fake tensors or the process group is a fake one: nothing is allocated then."""
    return is_fake_world() or any(isinstance(param, FakeTensor) for module in modules for param in module.parameters())


def missing_bytes(num_bytes: float) -> int:
    """Bytes that a node or process lacks where each process takes `num_bytes`; the maximum over all, on all ranks."""
    needs = gather_objects((platform.node(), num_bytes, free_on_node(), free_to_process()))
    short = [needed - process_free for _, needed, _, process_free in needs]
    for node in {node for node, *_ in needs}:
        on_node = [(needed, free) for name, needed, free, _ in needs if name == node]
        short.append(sum(needed for needed, _ in on_node) - min(free for _, free in on_node))
    return int(max(0.0, *short))


def need_host_memory(num_bytes: float, what: str, remedy: str) -> None:
    """Check that each process can allocate `num_bytes` on the host. Collective: all ranks call it.

    Raises:
        OutOfBudgetError: a node lacks the memory; raised on all ranks.
    """
    short = missing_bytes(num_bytes)
    if short:
        raise OutOfBudgetError(
            f"{what} takes {format_bytes(num_bytes)} of host memory for a process, and {format_bytes(free_on_node())} "
            f"of this node are free: a node is short of {format_bytes(short)}. {remedy}"
        )
