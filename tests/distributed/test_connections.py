"""Over gloo a group connects all with all when it is made, or, as docs/scale.md says, those who talk when they do."""

from __future__ import annotations

import itertools
import os

import pytest
import torch
import torch.distributed as dist

from tests.pool import Pool


def sockets() -> int:
    """Of this process."""
    links = (f"/proc/self/fd/{each}" for each in os.listdir("/proc/self/fd"))
    return sum(os.readlink(each).startswith("socket:") for each in links if os.path.islink(each))


def opened(rank: int, size: int, lazily: bool) -> list[int]:
    """Sockets that a group of all opens when it is made, and when it is used."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_GLOO_LAZY_INIT", str(int(lazily)))
        dist.barrier()
        counts = [sockets()]
        group = dist.new_group()
        dist.barrier()
        counts.append(sockets())
        dist.all_reduce(torch.ones(1), group=group)
        dist.barrier()
        counts.append(sockets())
        dist.destroy_process_group(group)
    return [after - before for before, after in itertools.pairwise(counts)]


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts file descriptors as Linux shows them")
def test_lazily_only_those_connect_who_talk(pool: Pool) -> None:
    for made, used in pool.run(opened, False, ranks=4):
        assert made >= 3
        assert used == 0
    for made, used in pool.run(opened, True, ranks=4):
        assert made < 3
        assert used > 0
