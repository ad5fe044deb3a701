"""Exchange of zero1's slices after a step, over gloo: an all-gather, as in zero1, against a broadcast by each owner.

Both run in one set of processes, interleaved. Ratios are of neighbouring runs, so that other load affects both.

    torchrun --nproc-per-node 2 benchmarks/zero1_exchange.py
"""

from __future__ import annotations

import statistics
import time

import torch
import torch.distributed as dist
from torch import Tensor

from atorch.runtime.data_parallel.buckets import SlicedBucket, gather, sliced_buckets

ROUNDS, WARM_UP = 24, 4
SHAPES = {
    "two blocks of width 1,024": [(1024, 1024)] * 8 + [(1024, 2816)] * 6 + [(1024,)] * 4,
    "one large matrix": [(8192, 4096)],
    "60 small matrices": [(256, 256)] * 60,
}


def by_owners(buckets: list[SlicedBucket], group: dist.ProcessGroup) -> None:
    """Exchange the same values as `gather`, with one broadcast for each slice."""
    under_way = []
    for bucket in buckets:
        first, numel = bucket.params[0], bucket.share * group.size()
        in_place = len(bucket.params) == 1 and first.numel() == numel
        whole = first.view(-1) if in_place else first.new_empty(numel)
        starts = dict(zip(bucket.params, bucket.starts, strict=True))
        for param, where in () if in_place else bucket.held(group.rank()):
            whole[starts[param] + where.start : starts[param] + where.stop] = param.view(-1)[where]
        works = [
            dist.broadcast(part, group=group, group_src=owner, async_op=True)
            for owner, part in enumerate(whole.split(bucket.share))
        ]
        under_way.append((works, whole, {} if in_place else starts))
    for works, whole, starts in under_way:
        for work in works:
            work.wait()
        for param, start in starts.items():
            param.view(-1).copy_(whole[start : start + param.numel()])


@torch.no_grad()
def main() -> None:
    """Print a line for each set of parameters."""
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    assert group is not None
    for name, shapes in SHAPES.items():
        params: list[Tensor] = [torch.full(shape, float(group.rank())) for shape in shapes]
        buckets = sliced_buckets(params, group.size())
        seconds: dict[object, list[float]] = {gather: [], by_owners: []}
        for _ in range(WARM_UP + ROUNDS):
            for exchange in (gather, by_owners):
                dist.barrier()
                began = time.perf_counter()
                exchange(buckets, group)
                dist.barrier()
                seconds[exchange].append(time.perf_counter() - began)
        of_gather, of_owners = (exchange_s[WARM_UP:] for exchange_s in seconds.values())
        ratio = statistics.median(b / a for a, b in zip(of_gather, of_owners, strict=True))
        if group.rank() == 0:
            size = sum(param.nbytes for param in params) / 2**20
            medians = " ms, ".join(
                f"{1e3 * statistics.median(exchange_s):.1f}" for exchange_s in (of_gather, of_owners)
            )
            print(
                f"{group.size()} processes, {name}, {size:.0f} MiB: gathered, by owners {medians} ms, ratio {ratio:.2f}"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
