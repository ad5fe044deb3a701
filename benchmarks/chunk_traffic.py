"""Bytes fetched in a training step under a budget, against the minimum for any chunk manager.

The budget is the activations' peak and 100, 50, 25 or 12 % of the parameters' bytes, in bfloat16. Chunks are laid out
and scheduled as for training. The minimum (`traffic_bound.py`) knows no chunks. If the largest operation does not fit,
nothing can run, and the row gives the reason.

    python benchmarks/chunk_traffic.py
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from chunk_shapes import Workload, workloads
from command import main
from compare import Row

SHARES = (1.0, 0.5, 0.25, 0.12)
ITEM_BYTES = 2


def measure(quick: bool = False) -> list[Row]:
    """All rows of this claim; `quick` takes one model."""
    return [row(workload, share) for workload in workloads(quick) for share in SHARES]


def row(workload: Workload, share: float) -> Row:
    """Fetched bytes over the minimum, with a budget of the activations' peak and this share of the parameters."""
    import torch
    from traffic_bound import lower_bound

    from atorch.errors import OutOfBudgetError
    from atorch.runtime.chunk.chunked import ChunkPlanner, pass_schedule
    from atorch.runtime.chunk.pass_schedule import moments

    sizes = [ITEM_BYTES * parameter.numel() for parameter in workload.parameters.values()]
    peak = max(access.other_bytes for access in workload.traced.accesses)
    budget = peak + int(share * sum(sizes))
    start = time.process_time()
    layout = ChunkPlanner(workload.parameters, workload.traced, budget, torch.bfloat16).lay_out()
    seconds = time.process_time() - start
    claim = f"{workload.name}, {share:.0%} of the parameters beside activations: bytes fetched against the least"
    try:
        found = pass_schedule(layout, workload.traced, budget).schedule
    except OutOfBudgetError as missing:
        return Row(claim, str(missing).split(":")[0], "")
    assert found is not None
    numbers = {name: number for number, name in enumerate(workload.parameters)}
    least = lower_bound(moments(workload.traced, numbers), sizes, budget)
    print(
        f"{workload.name}, {share:.0%}: {len(layout.chunks)} chunks of {len(sizes)} parameters, {found.num_fetches} "
        f"transfers at {len(found.steps)} moments, {found.fetched_bytes / sum(sizes):.2f} of the parameters' bytes, "
        f"{found.peak_bytes / budget:.1%} of the budget used; laid out in {seconds:.1f} CPU-seconds",
        file=sys.stderr,
    )
    ratio = found.fetched_bytes / least
    return Row(claim, f"{ratio:.4f}", "≤ 1.02", ratio <= 1.02)


if __name__ == "__main__":
    main(measure)
