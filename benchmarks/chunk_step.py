"""A training step in chunks against a plain one: with room for everything, and with half of the parameters away.

A Llama on one process, AdamW in its fused form. With room for everything, states included, chunks stay where they are,
and what is seen is what the bookkeeping costs. With room for parameters alone they are fetched once a step and
gradients are kept on the host, which on a CPU is copying within one memory. With a budget of all activations and half
of the parameters, chunks come and gradients go over a link of a given speed in each direction (threads copy, and wait
as long as the link would): forward and backward are held to the longer of computing and moving. What threads that copy
as much take from a plain pass on this machine, whose link is its memory, is told beside it. Steps run interleaved in a
shuffled order; the plain step runs twice, and the ratio of the two is the noise floor.

    python benchmarks/chunk_step.py [--quick]
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from command import main
from compare import Row, interleave
from small_llama import VOCAB, make_model, make_tokens

from atorch.auto.opt_lib.chunk_trace import foreseen
from atorch.runtime.chunk.chunked import chunk
from atorch.runtime.chunk.optimizer import ChunkOptimizer
from atorch.runtime.chunk.transfer import Paced, Transfer

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


def measure_idle(quick: bool) -> list[Row]:
    """With room for everything, and for parameters alone."""
    width, layers, batch = (64, 2, make_tokens(2, 32)) if quick else (512, 4, make_tokens(4))
    plain, again = make_model(width, layers), make_model(width, layers)
    model, optimizer, _ = in_chunks(width, layers, batch, 5.0, None, state_bytes=8.0)
    fetching, stepping, _ = in_chunks(width, layers, batch, 1.1, None)
    steps = {
        "plain": step_of(plain, adam(plain.parameters()), batch),
        "again": step_of(again, adam(again.parameters()), batch),
        "staying": step_of(model, optimizer, batch),
        "fetched": step_of(fetching, stepping, batch),
    }
    samples = interleave(steps, rounds=3 if quick else 40, warmup=1 if quick else 3)
    staying, fetched, noise = (samples.ratio(name, "plain") for name in ("staying", "fetched", "again"))
    return [
        Row(
            f"chunk with room for everything, width {width}: step ÷ plain step",
            f"{staying:.3f} (plain against itself {noise.value:.3f})",
            f"≤ {IDLE_BAR}",
            staying.value <= IDLE_BAR,
        ),
        Row(f"chunk with room for parameters alone, width {width}: step ÷ plain step", f"{fetched:.3f}", "informs"),
    ]


def measure_moving(quick: bool, length: int) -> list[Row]:
    """With half of the parameters away, over a link; `length` tokens set how much there is to compute."""
    width, layers = (64, 2) if quick else (768, 4)
    batch = make_tokens(1, length)
    plain = make_model(width, layers)
    link = Paced(LINK_BYTES_PER_S)
    model, _, fetched = in_chunks(width, layers, batch, 0.5, link)
    returned = sum(parameter.nbytes for parameter in plain.parameters())
    passes = passes_of(plain, batch)
    try:
        steps = {
            "compute": passes,
            "chunks": passes_of(model, batch),
            "copies": beside_copies(passes, link, fetched, returned),
        }
        samples = interleave(steps, rounds=3 if quick else 40, warmup=1 if quick else 3)
    finally:
        link.close()
    moving_ms = max(fetched, returned) / LINK_BYTES_PER_S * 1e3
    longer = max(samples.median_ms("compute"), moving_ms)
    ratio, copies = samples.median_ms("chunks") / longer, samples.median_ms("copies") / longer
    title = f"half of the parameters away, {LINK_BYTES_PER_S / 1e9:.0f} GB/s, {length} tokens: "
    return [
        Row(
            f"chunk, {title}forward and backward ÷ max(compute, transfer)",
            f"{ratio:.3f} (transfer ÷ compute {moving_ms / samples.median_ms('compute'):.2f})",
            f"≤ {MOVING_BAR}",
            ratio <= MOVING_BAR,
        ),
        Row(f"plain, {title}as many bytes copied beside it ÷ max(compute, transfer)", f"{copies:.3f}", "informs"),
        Row(
            f"{length} tokens: chunk ÷ plain with copies beside it",
            f"{samples.ratio('chunks', 'copies'):.3f}",
            "informs",
        ),
    ]


def measure(quick: bool = False) -> list[Row]:
    torch.set_num_threads(1)
    moving = [row for length in ((8, 16) if quick else (16, 128)) for row in measure_moving(quick, length)]
    return [*measure_idle(quick), *moving]


if __name__ == "__main__":
    main(measure)
