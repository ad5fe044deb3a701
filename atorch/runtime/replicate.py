"""Data parallelism: every rank holds the whole module, gradients are averaged while backward runs.

torch's DistributedDataParallel, under which names, state dicts and attributes stay the user's.
Memory: as on one device, since gradients live in the buckets that are reduced. Communication per step: an all-reduce
of the gradients, bucket by bucket, hidden behind the rest of backward.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from atorch.runtime.wrapper import Wrapper


class Replicated(Wrapper):
    """DistributedDataParallel that speaks the user's names: no `module.` before a parameter, attributes reachable.

    It has one and is none: torch.distributed.checkpoint knows one by its type, and insists on names with `module.`.

    Losses must come from calling the module itself; methods of the user's that are reached through it run on this
    rank alone, as `generate` should, and their gradients would not be averaged.
    """

    def __init__(self, replicas: DistributedDataParallel) -> None:
        super().__init__()
        self.module: nn.Module = replicas.module
        self._replicas = (replicas,)  # in a tuple, or its parameters would be found a second time

    @property
    def replicas(self) -> DistributedDataParallel:
        """What averages, for its communication hooks and the like."""
        return self._replicas[0]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output; backward through it averages gradients."""
        return self.replicas(*args, **kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside, backward passes add gradients up without averaging them."""
        return self.replicas.no_sync()


def replicas_of(model: nn.Module) -> DistributedDataParallel | None:
    """What averages the gradients of `model`; None where nothing of torch's does."""
    if isinstance(model, Replicated):
        return model.replicas
    return model if isinstance(model, DistributedDataParallel) else None


def replicate(
    module: nn.Module,
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    find_unused_parameters: bool = False,
    static_graph: bool = False,
    bucket_cap_mb: int = 25,
) -> nn.Module:
    """`module` on `device`, equal on all ranks of `group` (rank 0's values), its gradients averaged over them.

    A group of one rank and a module with nothing to train come back as they are: there is nothing to average.
    Parameters that are frozen now stay local, as do buffers except that each forward pass starts from rank 0's.

    Args:
        find_unused_parameters: look for parameters that a forward pass did not use, for which backward must not wait.
        static_graph: every step uses the same parameters in the same way.
        bucket_cap_mb: size in MiB of the buckets that are reduced at once.
    """
    if any(tensor.device != device for tensor in (*module.parameters(), *module.buffers())):
        module.to(device)  # fakes that are on it already cannot all be moved
    if group.size() == 1 or not any(parameter.requires_grad for parameter in module.parameters()):
        return module
    return Replicated(
        DistributedDataParallel(
            module,
            process_group=group,
            find_unused_parameters=find_unused_parameters,
            static_graph=static_graph,
            bucket_cap_mb=bucket_cap_mb,
            gradient_as_bucket_view=True,  # else gradients exist twice, in the bucket and beside it
        )
    )
