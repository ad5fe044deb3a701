"""Data parallelism: every rank holds the whole module, gradients are averaged while backward runs.

torch's DistributedDataParallel, under which names, state dicts and attributes stay the user's.
Memory: as on one device, since gradients live in the buckets that are reduced. Communication per step: an all-reduce
of the gradients, bucket by bucket, hidden behind the rest of backward.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from atorch.runtime.wrapper import Wrapper


class Replicated(Wrapper, DistributedDataParallel):
    """DistributedDataParallel that speaks the user's names: no `module.` before a parameter, attributes reachable.

    Losses must come from calling the module itself; methods of the user's that are reached through it run on this
    rank alone, as `generate` should, and their gradients would not be averaged.
    """


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
        module,
        process_group=group,
        find_unused_parameters=find_unused_parameters,
        static_graph=static_graph,
        bucket_cap_mb=bucket_cap_mb,
        gradient_as_bucket_view=True,  # else gradients exist twice, in the bucket and beside it
    )
