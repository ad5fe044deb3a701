"""A training step in chunks against a plain one: with room for everything, and with half of the parameters away.

A Llama on one process, AdamW in its fused form. With room for everything, states included, chunks stay where they are,
and what is seen is what the bookkeeping costs. With room for parameters alone they are fetched once a step and
gradients are kept on the host, which on a CPU is copying within one memory. With a budget of all activations and half
of the parameters, chunks come and gradients go over a link of a given speed in each direction (threads copy, and wait
as long as the link would): forward and backward are held to the longer of computing and moving. What threads that copy
as much take from a plain pass on this machine, whose link is its memory, is told beside it. Steps run interleaved in a
shuffled order; the plain step runs twice, and the ratio of the two is the noise floor. A device that computes by itself
is one that sleeps: its backward takes as long as the host's step, which then runs after it, or beside it, in the same
kernel or in torch's loop over parameters. Freed memory stays with the
process, as allocators of accelerators keep it; with room for everything it is also measured without that.

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

from atorch.auto.opt_lib.chunk.trace import foreseen
from atorch.runtime.chunk.chunked import chunk
from atorch.runtime.chunk.optimizer.optimizer import ChunkOptimizer
from atorch.runtime.chunk.transfer import Transfer

LINK_BYTES_PER_S = 16e9
IDLE_BAR, MOVING_BAR = 1.03, 1.05
PIECE = 2**20  # elements of a copy that has nothing to do with the step

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
    """Forward and backward alone: what moving has to hide behind."""

    def step() -> None:
        loss_of(model, batch).backward()
        for parameter in model.parameters():
            parameter.grad = None

    return step


def beside_copies(step: Step, link: Paced, there: int, back: int) -> Step:
    """The step, while the link moves so many bytes each way, which have nothing to do with it."""
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
    """A model with room for its activations and a share of its parameters; the bytes that a pass fetches."""
    model = make_model(width, layers)
    foreseen_pass = foreseen(model, batch, loss_of, device_type="cpu", lingering=transfer is not None)
    most = max(access.other_bytes for access in foreseen_pass.accesses)
    size = sum(parameter.nbytes for parameter in model.parameters())
    operations = chunk(
        model,
        foreseen_pass,
        most + int(share * size),
        device=torch.device("cpu"),
        prefetch=4,
        transfer=transfer,
        state_bytes=state_bytes,
    )
    fetched = operations.residency.course.schedule
    assert fetched is not None
    return model, ChunkOptimizer(adam, model.parameters(), operations.chunks), fetched.fetched_bytes


def idle(width: int, layers: int, rows: int, length: int, rounds: int) -> list[tuple[str, str, bool | None]]:
    """With room for everything, and for parameters alone: what, the ratio, and whether it is within its bar."""
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
    """With half of the parameters away, over a link."""
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
    """What a device computes by itself for so many seconds, twice as long in backward: the host has nothing to do."""

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
    """Layers that a device computes."""

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
    """The host steps everything: after backward unfused, fused, and fused beside backward."""
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

        passed = foreseen(model, batch, loss, device_type="cpu")
        size = sum(parameter.nbytes for parameter in model.parameters())
        operations = chunk(model, passed, 2 * size, device=torch.device("cpu"), chunk_size=width * width)
        given = operations.gradients if early else None
        optimizer = ChunkOptimizer(make, model.parameters(), operations.chunks, early=given)
        models.append(model)

        def step(model: nn.Module = model, optimizer: Any = optimizer) -> None:
            loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()

        steps[name] = step
    alone = interleave({"after": steps["after"]}, rounds, warmup=3).median_ms("after") / 1e3
    for model in models:
        model.seconds[0] = alone / (2 * layers)
    samples = interleave(steps, rounds, warmup=1)
    return [
        ("step of a device and its host, beside backward ÷ after it", f"{samples.ratio('beside', 'after'):.3f}", None),
        ("the same ÷ after it, not fused", f"{samples.ratio('beside', 'loop'):.3f}", None),
    ]


def in_process(case: str, *sizes: int) -> list[tuple[str, str, bool | None]]:
    torch.set_num_threads(1)
    return {"idle": idle, "moving": moving, "stepping": stepping}[case](*sizes)


def measure(quick: bool = False) -> list[Row]:
    """All rows of this claim."""
    if quick:
        cases = [("idle", True, (64, 2, 2, 32, 3)), ("moving", True, (64, 2, 1, 16, 3))]
        cases += [("stepping", True, (64, 2, 1, 1, 3))]
    else:
        cases = [("idle", keeping, (512, 4, 4, SEQ, 25)) for keeping in (True, False)]
        sizes = [(768, 4, 1, 16, 30), (768, 4, 1, 128, 30), (1536, 4, 1, 128, 8), (1536, 4, 1, 512, 6)]
        cases += [("moving", True, each) for each in sizes]
        cases += [("stepping", True, (1024, 16, 1, 1, 15))]
    rows = []
    for case, keeping, (width, layers, samples, length, rounds) in cases:
        environment = KEEPING_MEMORY if keeping else {}
        found = answer_of(
            __file__, case, width, layers, samples, length, rounds, processes=None, environment=environment
        )
        title = f"chunk, width {width}, {samples} × {length} tokens"
        title += f", {LINK_BYTES_PER_S / 1e9:.0f} GB/s" if case == "moving" else ""
        title += "" if keeping else ", freed memory given back to the system"
        bar = MOVING_BAR if case == "moving" else IDLE_BAR
        rows += [
            Row(f"{title}: {what}", ratio, "" if holds is None else f"≤ {bar}", holds) for what, ratio, holds in found
        ]
    return rows


if __name__ == "__main__":
    main(measure, in_process=in_process)
