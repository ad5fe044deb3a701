"""Ring attention of a long causal sequence on two processes against whole attention on each.

Measures seconds of a rank's forward and backward, its peak live bytes, and two gains: from load balance, and from
sending keys during computation. *waiting* is the same ring that waits for each hop first. Variants run interleaved in a
shuffled order. A variant's time is that of the slower rank, since ranks wait for each other.

    python benchmarks/ring_attention.py [--quick]
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

sys.path.insert(0, str(Path(__file__).parent))
from command import answer_of, as_rank, main
from compare import Row, interleave

from atorch.profiler.memory_tracker import OTHER, LiveBytes
from atorch.runtime.context_parallel import Ring, RingSchedule, attend_around
from atorch.runtime.context_parallel.load_balancing import TokenAssignment, schedule

HEADS, GROUPS, DIM = 8, 2, 64

Step = Callable[[], object]


class WaitingRing(Ring):
    """A ring that computes nothing during transfers of keys."""

    def pass_on(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Send and wait."""
        arrived = super().pass_on(tensor)()
        return lambda: arrived


def inputs(length: int) -> list[Tensor]:
    """Queries, keys, values, and the gradient of the result."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    heads = (HEADS, GROUPS, GROUPS, HEADS)
    tensors = [torch.randn(1, count, length, DIM, generator=generator) for count in heads]
    return [tensor.requires_grad_() for tensor in tensors[:3]] + tensors[3:]


def backward(forward: Callable[[], Tensor], given: list[Tensor], grad: Tensor) -> Step:
    return lambda: torch.autograd.grad(forward(), given, grad)


def whole(length: int) -> tuple[Callable[[], Tensor], list[Tensor], Tensor]:
    """torch's attention to the whole sequence, its inputs, and the gradient of its result."""
    *given, grad = inputs(length)
    return lambda: scaled_dot_product_attention(*given, is_causal=True, enable_gqa=True), given, grad


def ring(
    length: int, *, balanced: bool = True, kind: type[Ring] = Ring
) -> tuple[Callable[[], Tensor], list[Tensor], Tensor]:
    """Ring attention of this rank's part, its inputs, and the gradient of its result."""
    around = kind(dist.group.WORLD)  # type: ignore[arg-type]  # a group exists
    part_length = length // around.size
    *given, grad = inputs(part_length)
    meetings = schedule(TokenAssignment(around.size, balanced), around.rank, part_length, part_length, is_causal=True)
    plan = RingSchedule(around, meetings, None, DIM**-0.5)
    return lambda: attend_around(*given, plan), given, grad


def live_mib(make: Callable[[], tuple[Callable[[], Tensor], list[Tensor], Tensor]]) -> tuple[float, float]:
    """MiB of live tensors after forward, and at the peak, including inputs and the result's gradient."""
    with LiveBytes() as live, live.default_category(OTHER):
        forward, given, grad = make()
        out = forward()
        live.mark("forward")
        kept = sum(live.now.values())
        torch.autograd.grad(out, given, grad)
        live.mark("end")
    return kept / 2**20, max(moment.total_bytes for moment in live.moments) / 2**20


def in_process(length: int, rounds: int) -> list[tuple[Any, ...]] | None:
    rank = as_rank()
    makers: dict[str, Callable[[], tuple[Callable[[], Tensor], list[Tensor], Tensor]]] = {
        "whole": lambda: whole(length),
        "whole again": lambda: whole(length),
        "ring": lambda: ring(length),
        "waiting": lambda: ring(length, kind=WaitingRing),
        "in order": lambda: ring(length, balanced=False),
    }

    def together(step: Step) -> Step:
        def run() -> None:
            step()
            dist.barrier()  # the slower rank's time

        return run

    samples = interleave({name: together(backward(*make())) for name, make in makers.items()}, rounds, warmup=1)
    live = {name: live_mib(makers[name]) for name in ("whole", "ring")}
    if rank != 0:
        return None
    title = f"causal attention of {length} tokens on 2 processes ({samples.median_ms('whole'):.0f} ms whole)"
    return [
        (f"{title}: whole again / whole", f"{samples.ratio('whole again', 'whole'):.3f}", "", None),
        (f"{title}: ring / whole", f"{samples.ratio('ring', 'whole'):.3f}", "", None),
        (f"{title}: ring that waits for each hop / ring", f"{samples.ratio('waiting', 'ring'):.3f}", "", None),
        (f"{title}: ring without load balance / ring", f"{samples.ratio('in order', 'ring'):.3f}", "", None),
        *(
            (f"{title}: MiB {when}, whole and ring", f"{live['whole'][i]:.1f} and {live['ring'][i]:.1f}", "", None)
            for i, when in enumerate(("kept for backward", "at most"))
        ),
    ]


def measure(quick: bool = False) -> list[Row]:
    lengths, rounds = ((1024,), 3) if quick else ((1024, 4096), 10)
    return [Row(*row) for length in lengths for row in answer_of(__file__, length, rounds)]


if __name__ == "__main__":
    main(measure, in_process=in_process)
