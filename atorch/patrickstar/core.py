"""The client: the device of a process, its memory budgets there and on the host, and its process group.

`initialize_engine` creates one from the configuration. Create one directly for a model that cannot be created in a
`model_func`: `PatrickStarEngine(model, PatrickStarClient(local_rank), config)`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from atorch.distributed.world import init, local_world_size
from atorch.errors import ArgumentError
from atorch.patrickstar.config import ClientSection


class PatrickStarClient:
    """The device, budgets and process group of an engine.

    Args:
        local_rank: this process's rank on its machine, and the index of its CUDA device; without CUDA it is the CPU.
        default_chunk_size: elements of a chunk; None to search for a good size.
        config: the section `client` of the configuration.

    Raises:
        ArgumentError: there is no such device, or the configuration is invalid.
    """

    def __init__(
        self,
        local_rank: int = 0,
        default_chunk_size: int | None = None,
        config: Mapping[str, Any] | ClientSection | None = None,
    ) -> None:
        self.config = ClientSection.of(config)
        self.local_rank, self.chunk_size = local_rank, default_chunk_size
        init()
        self.group: dist.ProcessGroup | None = None
        if dist.is_initialized() and dist.get_world_size() > 1:
            self.group = dist.group.WORLD
        self.device = self._device()

    @property
    def budget_bytes(self) -> int:
        """Bytes that this process may hold on the device."""
        tracer = self.config.mem_tracer
        sharing = local_world_size() if tracer.use_fake_dist or self.device.type == "cpu" else 1
        if tracer.gpu_memory_bytes is not None:
            whole, sharing = tracer.gpu_memory_bytes, local_world_size() if tracer.use_fake_dist else 1
        elif self.device.type == "cuda":
            whole = torch.cuda.get_device_properties(self.device).total_memory
        else:
            whole = _host_bytes()
        return int(whole * tracer.overall_gpu_mem_ratio) // sharing

    @property
    def host_budget_bytes(self) -> int:
        """Bytes that this process may fill with chunks on the host."""
        return int(_host_bytes() * self.config.mem_tracer.overall_cpu_mem_ratio) // local_world_size()

    def _device(self) -> torch.device:
        if not torch.cuda.is_available():
            return torch.device("cpu")
        index, count = 0 if self.config.mem_tracer.use_fake_dist else self.local_rank, torch.cuda.device_count()
        if not 0 <= index < count:
            raise ArgumentError(
                f"local_rank is {index}, and this machine has {count} CUDA devices; start as many processes, or set "
                "client.mem_tracer.use_fake_dist to let them share the first one"
            )
        torch.cuda.set_device(index)
        return torch.device("cuda", index)


@contextmanager
def torch_scope(do_allreduce: bool = True) -> Iterator[None]:
    """Accepted for PatrickStar scripts: parameters created inside are managed in chunks as all others.

    Raises:
        ArgumentError: `do_allreduce` is False, for parameters that differ between processes.
    """
    if not do_allreduce:
        raise ArgumentError(
            "torch_scope was given do_allreduce=False, for parameters that each process trains alone; processes of an "
            "engine hold one model: leave it out"
        )
    yield


def _host_bytes() -> int:
    import psutil

    return int(psutil.virtual_memory().total)
