"""A training step in chunks against a plain one: with room for everything, and with half of the parameters away.

Trains a Llama on one process with fused AdamW. Steps run interleaved in a shuffled order. The plain step runs twice,
and the ratio of the two is the noise floor. Freed memory stays with the process, as allocators of accelerators keep it.

- Room for everything, states included: chunks stay, so the ratio is the cost of bookkeeping. This case also runs with
  freed memory given back to the system.
- Room for parameters alone: chunks are fetched once a step, gradients are kept on the host. On a CPU, both are copies
  within one memory.
- Room for activations and half of the parameters: chunks arrive and gradients leave over a link of a given speed in
  each direction. Threads copy, and wait as long as the link would. The bar compares forward and backward with the
  longer of computing and moving. For information, a plain pass runs while threads copy as many bytes.
- A device that computes by itself: it sleeps. Its backward takes as long as the host's step, which runs after backward
  or during it, fused or in torch's loop over parameters.

    python benchmarks/chunk_step.py [--quick]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from command import KEEPING_MEMORY, answer_of, main
from compare import Row, interleave
from paced_link import Paced
from small_llama import SEQ, VOCAB, make_model, make_tokens

from atorch.auto.opt_lib.chunk.trace import trace_pass
from atorch.runtime.chunk.chunk_optimizer import ChunkOptimizer
from atorch.runtime.chunk.chunked import chunk
from atorch.runtime.chunk.transfer import Transfer

LINK_BYTES_PER_S = 16e9
IDLE_BAR, MOVING_BAR = 1.03, 1.05
PIECE = 2**20  # elements of one copy in `beside_copies`

Step = Callable[[], object]


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=batch).logits[:, :-1]
    return nn.functional.cross_entropy(logits.reshape(-1, VOCAB), batch[:, 1:].reshape(-1))


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> Step:
    def step() -> None:
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def passes_of(model: nn.Module, batch: torch.Tensor) -> Step:
    """Forward and backward alone, behind which transfers have to hide."""

    def step() -> None:
        loss_of(model, batch).backward()
        for parameter in model.parameters():
            parameter.grad = None

    return step


def beside_copies(step: Step, link: Paced, there: int, back: int) -> Step:
    """The step, while the link moves unrelated bytes in both directions."""
    pairs = [torch.zeros(2, nbytes // 4) for nbytes in (there, back)]
    coming, going = ([tuple(piece) for piece in pair.split(PIECE, dim=1)] for pair in pairs)

    def run() -> None:
        waits = [link.start(target, source) for target, source in coming]
        for target, source in going:
            link.keep(target, source, add=False)
        step()
        for wait in waits:
            wait()
        link.settle()

    return run


def in_chunks(
    width: int,
    layers: int,
    batch: torch.Tensor,
    share: float,
    transfer: Transfer | None,
    state_bytes: float | None = None,
) -> tuple[nn.Module, ChunkOptimizer, int]:
    """A model with room for activations and a share of its parameters, its optimizer, and the bytes a pass fetches."""
    model = make_model(width, layers)
    traced = trace_pass(model, batch, loss_of, device_type="cpu", lingering=transfer is not None)
    most = max(access.other_bytes for access in traced.accesses)
    size = sum(parameter.nbytes for parameter in model.parameters())
    operations = chunk(
        model,
        traced,
        most + int(share * size),
        device=torch.device("cpu"),
        prefetch=4,
        transfer=transfer,
        state_bytes=state_bytes,
    )
    fetched = operations.residency.pass_schedule.schedule
    assert fetched is not None
    return model, ChunkOptimizer(adam, model.parameters(), operations.chunks), fetched.fetched_bytes


def idle(width: int, layers: int, rows: int, length: int, rounds: int) -> list[tuple[str, str, bool | None]]:
    """Room for everything, and for parameters alone: (what, the ratio, whether it is within its bar)."""
    batch = make_tokens(rows, length)
    plain, again = make_model(width, layers), make_model(width, layers)
    model, optimizer, _ = in_chunks(width, layers, batch, 5.0, None, state_bytes=8.0)
    fetching, stepping, _ = in_chunks(width, layers, batch, 1.1, None)
    steps = {
        "plain": step_of(plain, adam(plain.parameters()), batch),
        "again": step_of(again, adam(again.parameters()), batch),
        "staying": step_of(model, optimizer, batch),
        "fetched": step_of(fetching, stepping, batch),
    }
    samples = interleave(steps, rounds, warmup=3)
    staying, fetched, noise = (samples.ratio(name, "plain") for name in ("staying", "fetched", "again"))
    return [
        ("room for everything: step ÷ plain step", f"{staying:.3f}", staying.value <= IDLE_BAR),
        ("room for parameters alone: step ÷ plain step", f"{fetched:.3f}", None),
        ("plain step again ÷ plain step", f"{noise:.3f}", None),
    ]


def moving(width: int, layers: int, rows: int, length: int, rounds: int) -> list[tuple[str, str, bool | None]]:
    """Half of the parameters on the host, behind a link."""
    batch = make_tokens(rows, length)
    plain, again = make_model(width, layers), make_model(width, layers)
    link = Paced(LINK_BYTES_PER_S)
    model, _, fetched = in_chunks(width, layers, batch, 0.5, link)
    returned = sum(parameter.nbytes for parameter in plain.parameters())
    passes = passes_of(plain, batch)
    try:
        steps = {
            "compute": passes,
            "again": passes_of(again, batch),
            "chunks": passes_of(model, batch),
            "copies": beside_copies(passes, link, fetched, returned),
        }
        samples = interleave(steps, rounds, warmup=3)
    finally:
        link.close()
    moving_ms = max(fetched, returned) / LINK_BYTES_PER_S * 1e3
    share = moving_ms / samples.median_ms("compute")
    assert share < 1, f"computing takes longer: {share}"
    ratio, copies, noise = (samples.ratio(name, "compute") for name in ("chunks", "copies", "again"))
    return [
        (f"passes ÷ the longer of computing and moving ({share:.2f} of it)", f"{ratio:.3f}", ratio.value <= MOVING_BAR),
        ("plain passes with as many bytes copied beside them ÷ plain passes", f"{copies:.3f}", None),
        ("in chunks ÷ plain with copies", f"{samples.ratio('chunks', 'copies'):.3f}", None),
        ("plain passes again ÷ plain passes", f"{noise:.3f}", None),
    ]


class Elsewhere(torch.autograd.Function):
    """Stands in for a device's work: the host sleeps `seconds` in forward, and twice as long in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: list[float]) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds[0])
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        time.sleep(2 * ctx.seconds[0])
        return gradients[0], None


class OnDevice(nn.Module):
    """Linear layers with a device's work after each."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))
        self.seconds = [0.0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = Elsewhere.apply(layer(x), self.seconds)
        return x


def stepping(width: int, layers: int, rows: int, _: int, rounds: int) -> list[tuple[str, str, bool | None]]:
    """Optimizer steps on the host: after backward unfused, after it fused, and fused during backward."""
    batch = torch.randn(rows, width)
    ways = {"loop": (False, False), "after": (True, False), "beside": (True, True)}
    steps: dict[str, Step] = {}
    models = []
    for name, (fused, early) in ways.items():
        model = OnDevice(width, layers)

        def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            return model(batch).square().mean()

        def make(groups: Any, fused: bool = fused) -> torch.optim.Optimizer:
            return torch.optim.AdamW(groups, lr=1e-4, fused=fused)

        passed = trace_pass(model, batch, loss, device_type="cpu")
        size = sum(parameter.nbytes for parameter in model.parameters())
        operations = chunk(model, passed, 2 * size, device=torch.device("cpu"), chunk_size=width * width)
        early_gradients = operations.gradients if early else None
        optimizer = ChunkOptimizer(make, model.parameters(), operations.chunks, early=early_gradients)
        models.append(model)

        def step(model: nn.Module = model, optimizer: Any = optimizer) -> None:
            loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()

        steps[name] = step
    step_s = interleave({"after": steps["after"]}, rounds, warmup=3).median_ms("after") / 1e3
    for model in models:
        model.seconds[0] = step_s / (2 * layers)
    samples = interleave(steps, rounds, warmup=1)
    return [
        ("step of a device and its host, beside backward ÷ after it", f"{samples.ratio('beside', 'after'):.3f}", None),
        ("the same ÷ after it, not fused", f"{samples.ratio('beside', 'loop'):.3f}", None),
    ]


def in_process(case: str, *sizes: int) -> list[tuple[str, str, bool | None]]:
    torch.set_num_threads(1)
    return {"idle": idle, "moving": moving, "stepping": stepping}[case](*sizes)


def measure(quick: bool = False) -> list[Row]:
    if quick:
        cases = [("idle", True, (64, 2, 2, 32, 3)), ("moving", True, (64, 2, 1, 16, 3))]
        cases += [("stepping", True, (64, 2, 1, 1, 3))]
    else:
        cases = [("idle", keeping, (512, 4, 4, SEQ, 25)) for keeping in (True, False)]
        sizes = [(768, 4, 1, 16, 30), (768, 4, 1, 128, 30), (1536, 4, 1, 128, 8), (1536, 4, 1, 512, 6)]
        cases += [("moving", True, case_sizes) for case_sizes in sizes]
        cases += [("stepping", True, (1024, 16, 1, 1, 15))]
    rows = []
    for case, keeping, (width, layers, samples, length, rounds) in cases:
        environment = KEEPING_MEMORY if keeping else {}
        results = answer_of(
            __file__, case, width, layers, samples, length, rounds, processes=None, environment=environment
        )
        title = f"chunk, width {width}, {samples} × {length} tokens"
        title += f", {LINK_BYTES_PER_S / 1e9:.0f} GB/s" if case == "moving" else ""
        title += "" if keeping else ", freed memory given back to the system"
        bar = MOVING_BAR if case == "moving" else IDLE_BAR
        rows += [
            Row(f"{title}: {what}", ratio, "" if holds is None else f"≤ {bar}", holds) for what, ratio, holds in results
        ]
    return rows


if __name__ == "__main__":
    main(measure, in_process=in_process)
