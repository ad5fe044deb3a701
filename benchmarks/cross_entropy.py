"""Cross entropy by chunks of logits against torch's cross entropy of all logits: seconds, and peak live bytes.

Runs forward and backward of a head with 131,072 classes, whose loss is taken in fp32, as in transformers. Seconds are
of fp32, with variants interleaved in a shuffled order. Bytes are of all tensors but operands and labels.

    python benchmarks/cross_entropy.py [--quick]
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parent))
from command import main
from compare import Row, interleave

from atorch.profiler.memory_tracker import OTHER, LiveBytes
from atorch.runtime.loss.lazy_logits import chunk_logits

SLOWER, SHARE, APART = 1.1, 1 / 8, 1e-6
HELD, TIMED = (8192, 256, 131_072), (2048, 256, 131_072)
"""Tokens, features and classes, for memory and for time."""


def job(tokens: int, features: int, classes: int, *, in_chunks: bool, autocast: bool) -> Callable[[], list[Tensor]]:
    """A step of a head and its loss, which returns the gradients of hidden states and weight."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, features, generator=generator).requires_grad_()
    labels = torch.randint(classes, (tokens,), generator=generator)
    torch.manual_seed(0)
    head = nn.Linear(features, classes, bias=False)
    if in_chunks:
        chunk_logits(head)

    def step() -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = F.cross_entropy(head(hidden).float(), labels)
        return list(torch.autograd.grad(loss, (hidden, head.weight)))

    return step


def most_bytes(*shape: int, in_chunks: bool, autocast: bool) -> float:
    """Peak live bytes of a step on fake tensors, which have the same sizes."""
    with FakeTensorMode():
        step = job(*shape, in_chunks=in_chunks, autocast=autocast)
        with LiveBytes() as live, live.default_category(OTHER):
            step()
            live.mark("step")
    return live.moments[0].total_bytes


def measure(quick: bool = False) -> list[Row]:
    shape, timed, rounds = ((4096, 8, 8192), (1024, 16, 1024), 2) if quick else (HELD, TIMED, 5)
    title = f"loss of {shape[0]} × {shape[2]} logits, by chunks / plain"
    rows = []
    for autocast in (False, True):
        by_chunks, plain = (most_bytes(*shape, in_chunks=in_chunks, autocast=autocast) for in_chunks in (True, False))
        kind = "bf16 autocast" if autocast else "fp32"
        share = by_chunks / plain
        rows.append(Row(f"{title}: most live bytes, {kind}", f"{share:.3f}", f"≤ {SHARE:.3f}", share <= SHARE))
    title = f"loss of {timed[0]} × {timed[2]} logits, by chunks / plain"
    steps = {
        name: job(*timed, in_chunks="chunk" in name, autocast=False) for name in ("plain", "plain again", "by chunks")
    }
    samples = interleave(steps, rounds, warmup=1)
    ratio, noise = samples.ratio("by chunks", "plain"), samples.ratio("plain again", "plain")
    rows.append(Row(f"{title}: seconds", f"{ratio:.3f}", f"≤ {SLOWER}", quick or ratio.low <= SLOWER))
    rows.append(Row(f"{title}: seconds of plain again", f"{noise:.3f}", ""))
    pairs = zip(steps["by chunks"](), steps["plain"](), strict=True)
    off = max(float((got - want).norm() / want.norm()) for got, want in pairs)
    rows.append(Row(f"{title}: gradients apart", f"{off:.1e}", f"≤ {APART:.0e}", off <= APART))
    return rows


if __name__ == "__main__":
    main(measure)
