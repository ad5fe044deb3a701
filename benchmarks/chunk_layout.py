"""Share of the memory of chunks that parameters take: GPT-2, BERT, Llama and ViT at two sizes each.

Chunks are laid out as for training in bfloat16, for one process and for 64 that share each chunk. The budget is the
activations' peak and half of the parameters' bytes. Rows without a bar have chunks of 64 Mi elements, all allocated
whole (the default of PatrickStar's guide); a larger parameter takes several.

    python benchmarks/chunk_layout.py
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from chunk_shapes import Workload, workloads
from command import main
from compare import Row

EQUAL_CHUNK = 64 * 2**20


def measure(quick: bool = False) -> list[Row]:
    """All rows of this claim; `quick` takes one model."""
    return [row for workload in workloads(quick) for row in rows(workload)]


def rows(workload: Workload) -> Iterator[Row]:
    """Utilisation for one process, for many, and with chunks of equal size."""
    import torch

    from atorch.runtime.chunk.chunked import ChunkPlanner
    from atorch.runtime.chunk.layout import Item, pack

    total = sum(parameter.numel() for parameter in workload.parameters.values())
    budget = max(access.other_bytes for access in workload.traced.accesses) + total
    for shards in (1, 64):
        layout = ChunkPlanner(workload.parameters, workload.traced, budget, torch.bfloat16, shards=shards).lay_out()
        sizes = [chunk.numel for chunk in layout.chunks]
        chunks = f"{len(sizes)} chunks, the largest of {max(sizes) / 2**20:.1f} Mi elements"
        used = total / sum(sizes)
        claim = f"{workload.name}: utilisation of {chunks}, {shards} process{'es' if shards > 1 else ''}"
        yield Row(claim, f"{used:.3%}", "≥ 99 %", used >= 0.99)
    items = [Item(name, parameter.numel(), "", True) for name, parameter in workload.parameters.items()]
    equal = sum(-(-chunk.numel // EQUAL_CHUNK) for chunk in pack(items, EQUAL_CHUNK).chunks)
    yield Row(
        f"{workload.name}: utilisation of {equal} chunks of 64 Mi elements", f"{total / equal / EQUAL_CHUNK:.1%}", ""
    )


if __name__ == "__main__":
    main(measure)
