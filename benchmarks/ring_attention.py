"""Ring attention of a long causal sequence on two processes against whole attention on each.

Seconds of a rank's forward and backward, its most live bytes, what load balance gives, and what it gives that keys are
under way while others are computed with: *waiting* is the same ring that waits for each hop first. Variants run
interleaved in a shuffled order; a variant's time is that of the slower rank, since they wait for each other.

    python benchmarks/ring_attention.py [--quick]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

sys.path.insert(0, str(Path(__file__).parent))
from compare import Row, interleave

from atorch.profiler.live_bytes import OTHER, LiveBytes
from atorch.runtime.context_parallel.balance import Deal, schedule
from atorch.runtime.context_parallel.ring import Ring, attend_around, plan_of

HEADS, GROUPS, DIM = 8, 2, 64

Step = Callable[[], object]


class WaitingRing(Ring):
    """A ring on which nothing is computed while keys are under way."""

    def pass_on(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Send and wait."""
        arrived = super().pass_on(tensor)()
        return lambda: arrived


def inputs(length: int) -> list[Tensor]:
    """Queries, keys, values, and the gradient of the result."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    heads = (HEADS, GROUPS, GROUPS, HEADS)
    tensors = [torch.randn(1, each, length, DIM, generator=generator) for each in heads]
    return [each.requires_grad_() for each in tensors[:3]] + tensors[3:]


def backward(forward: Callable[[], Tensor], given: list[Tensor], grad: Tensor) -> Step:
    return lambda: torch.autograd.grad(forward(), given, grad)


def whole(length: int) -> tuple[Callable[[], Tensor], list[Tensor], Tensor]:
    """Attention to the whole sequence, by torch; its inputs, and the gradient of its result."""
    *given, grad = inputs(length)
    return lambda: scaled_dot_product_attention(*given, is_causal=True, enable_gqa=True), given, grad


def ring(
    length: int, *, balanced: bool = True, kind: type[Ring] = Ring
) -> tuple[Callable[[], Tensor], list[Tensor], Tensor]:
    """Attention of this rank's part; the same."""
    around = kind(dist.group.WORLD)  # type: ignore[arg-type]  # there is one
    each = length // around.size
    *given, grad = inputs(each)
    meetings = schedule(Deal(around.size, balanced), around.rank, each, each, is_causal=True)
    plan = plan_of(around, meetings, given[0], None, None, 0.0)
    return lambda: attend_around(*given, plan), given, grad


def live_mib(make: Callable[[], tuple[Callable[[], Tensor], list[Tensor], Tensor]]) -> tuple[float, float]:
    """Bytes of live tensors, inputs and the result's gradient included: after forward, and at most."""
    with LiveBytes() as live, live.born(OTHER):
        forward, given, grad = make()
        out = forward()
        live.mark("forward")
        kept = sum(live.now.values())
        torch.autograd.grad(out, given, grad)
        live.mark("end")
    return kept / 2**20, max(moment.total_bytes for moment in live.moments) / 2**20


def rank_main(length: int, rounds: int, answer: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
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
    if dist.get_rank() == 0:
        title = f"causal attention of {length} tokens on 2 processes ({samples.median_ms('whole'):.0f} ms whole)"
        rows = [
            (f"{title}: whole again / whole", f"{samples.ratio('whole again', 'whole'):.3f}", "", None),
            (f"{title}: ring / whole", f"{samples.ratio('ring', 'whole'):.3f}", "", None),
            (f"{title}: ring that waits for each hop / ring", f"{samples.ratio('waiting', 'ring'):.3f}", "", None),
            (f"{title}: ring without load balance / ring", f"{samples.ratio('in order', 'ring'):.3f}", "", None),
            *(
                (f"{title}: MiB {when}, whole and ring", f"{live['whole'][i]:.1f} and {live['ring'][i]:.1f}", "", None)
                for i, when in enumerate(("kept for backward", "at most"))
            ),
        ]
        Path(answer).write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def measure(quick: bool = False) -> list[Row]:
    """All rows of this claim."""
    rows = []
    for length in (1024,) if quick else (1024, 4096):
        with tempfile.NamedTemporaryFile() as answer:
            command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", __file__]
            command += ["--as-rank", "--length", str(length), "--rounds", "3" if quick else "10"]
            subprocess.run([*command, "--answer", answer.name], check=True, capture_output=True, timeout=900)
            rows += [Row(*row) for row in json.loads(Path(answer.name).read_text())]
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few rounds: shows that it runs, not a result")
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--length", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--answer", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.as_rank:
        rank_main(given.length, given.rounds, given.answer)
    else:
        for row in measure(given.quick):
            print(row.claim, "|", row.measured, "|", row.bar, "|", row.holds)
