"""A training step under `atorch.smp` against the same step under `auto_accelerate`, with the same degrees.

A Llama runs in a pipeline of two, cut in the middle of its blocks, with four micro-batches under 1F1B: on two
processes, and on four with two replicas. Both give the loss to every process. A step ends when all processes have ended
it. Steps run interleaved in a shuffled order; the one of auto_accelerate runs twice, and the ratio of the two is the
noise floor.

    python benchmarks/smp_step.py [--quick]
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from command import answer_of, as_rank, main
from compare import Row, interleave
from small_llama import make_model, make_tokens

import atorch.smp as smp
from atorch import auto_accelerate

ROWS, LAYERS, MICRO_BATCHES, STAGES = 8, 4, 4, 2
CUT = LAYERS // STAGES
BAR = 1.05

Step = Callable[[], Tensor]


def make_batch() -> dict[str, Tensor]:
    tokens = make_tokens(ROWS)
    return {"input_ids": tokens, "labels": tokens}


def by_atorch(width: int) -> Step:
    """The documented loop's step."""
    replicas = dist.get_world_size() // STAGES
    strategy: list[Any] = [
        ("parallel_mode", ([("pipeline", STAGES), ("data", replicas)], None)),
        (
            "pipeline_parallel",
            {"schedule": "1f1b", "micro_batches": MICRO_BATCHES, "split_points": [f"model.layers.{CUT}"]},
        ),
    ]
    _, result, _ = auto_accelerate(
        make_model(width, LAYERS),
        torch.optim.AdamW,
        loss_func=lambda batch, output: output["loss"],
        optim_args={"lr": 1e-4},
        model_input_format="unpack_dict",
        sample_batch=make_batch(),
        load_strategy=[*strategy, *(["ddp"] if replicas > 1 else [])],
    )
    assert result is not None
    model, optim, _, loss_func, _, _ = result
    batch = make_batch()

    def step() -> Tensor:
        loss = loss_func(batch, model(**batch))
        loss.backward()
        optim.step()
        optim.zero_grad()
        return loss.detach()

    return step


@smp.step
def train(model: Any, input_ids: Tensor, labels: Tensor) -> Tensor:
    loss = model(input_ids=input_ids, labels=labels)["loss"]
    model.backward(loss)
    return loss


def by_smp(width: int) -> Step:
    """The step of a script for SageMaker model parallel, with the same cut."""
    smp.init({"pipeline_parallel_degree": STAGES, "microbatches": MICRO_BATCHES, "auto_partition": False, "ddp": True})
    whole = make_model(width, LAYERS)
    for module in (*whole.model.layers[CUT:], whole.model.norm, whole.lm_head):
        smp.set_partition(module, 1)
    model = smp.DistributedModel(whole)
    optim = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-4))
    batch = make_batch()

    def step() -> Tensor:
        loss = train(model, batch["input_ids"], batch["labels"]).reduce_mean()
        optim.step()
        optim.zero_grad()
        return loss

    return step


def ended(step: Step) -> Step:
    """The step, followed by a barrier."""

    def run() -> Tensor:
        loss = step()
        dist.barrier()
        return loss

    return run


def in_process(width: int, rounds: int) -> list[tuple[Any, ...]] | None:
    rank = as_rank()
    steps = {
        "auto": ended(by_atorch(width)),
        "auto again": ended(by_atorch(width)),
        "smp": ended(by_smp(width)),
    }
    for _ in range(3):
        losses = {name: step() for name, step in steps.items()}
    torch.testing.assert_close(losses["smp"], losses["auto"], rtol=1e-4, atol=1e-4, msg="both train the same")
    samples = interleave(steps, rounds)
    if rank != 0:
        return None
    ratio, null = samples.ratio("smp", "auto"), samples.ratio("auto again", "auto")
    replicas = dist.get_world_size() // STAGES
    degrees = f"pipeline {STAGES}" + (f" × data {replicas}" if replicas > 1 else "")
    title = f"{degrees}, width {width} ({samples.median_ms('auto'):.1f} ms a step)"
    return [
        (f"{title}: smp / auto_accelerate", f"{ratio:.3f}", f"≤ {BAR}", ratio.value <= BAR),
        (f"{title}: auto_accelerate again / auto_accelerate", f"{null:.3f}", "", None),
    ]


def measure(quick: bool = False) -> list[Row]:
    rounds = 20 if quick else 80
    cases = [(processes, width) for processes in (2, 4) for width in (64, 256)]
    return [Row(*row) for processes, width in cases for row in answer_of(__file__, width, rounds, processes=processes)]


if __name__ == "__main__":
    main(measure, in_process=in_process)
