"""A training step under `tensor_parallel` against the same split written by hand with torch's `parallelize_module`.

A Llama runs on two processes. The hand-written split is made for this model: inputs of attention and MLP are converted
once, so that backward has one all-reduce for each; the embedding is split by rows, the head by columns. The collectives
of both are counted. Steps run interleaved in a shuffled order; the hand-written step runs twice, and the ratio of the
two is the noise floor.

    python benchmarks/tensor_parallel_step.py [--quick]
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from command import answer_of, as_rank, main
from compare import Row, interleave
from small_llama import VOCAB, make_model, make_tokens

from atorch import auto_accelerate
from atorch.profiler.memory_tracker import CommCounter

ROWS = 4
BAR = 1.02

Step = Callable[[], object]


def make_batch() -> dict[str, torch.Tensor]:
    return {"input_ids": make_tokens(ROWS)}


def loss_func(batch: Any, output: Any) -> torch.Tensor:
    logits, labels = output["logits"][:, :-1], batch["input_ids"][:, 1:]
    return nn.functional.cross_entropy(logits.reshape(-1, VOCAB), labels.reshape(-1))


def by_hand(width: int) -> Step:
    """The step as one writes it in torch."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        parallelize_module,
    )

    model: Any = make_model(width)
    whole = Replicate()
    plan: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=whole),
        "lm_head": ColwiseParallel(output_layouts=whole),
        "model.layers.*.self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": whole}, desired_input_kwarg_layouts={"hidden_states": whole}
        ),
        "model.layers.*.mlp": PrepareModuleInput(input_layouts=whole, desired_input_layouts=whole),
    }
    plan.update({f"model.layers.*.self_attn.{name}_proj": ColwiseParallel() for name in "qkv"})
    plan.update({f"model.layers.*.mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")})
    plan.update({f"model.layers.*.{name}": RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")})
    parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), plan)
    optim, batch = torch.optim.AdamW(model.parameters(), lr=1e-4), make_batch()

    def step() -> None:
        loss_func(batch, model(**batch)).backward()
        optim.step()
        optim.zero_grad()

    return step


def by_atorch(width: int) -> Step:
    """The documented loop's step under a strategy that names no layer."""
    _, result, _ = auto_accelerate(
        make_model(width),
        torch.optim.AdamW,
        loss_func=loss_func,
        optim_args={"lr": 1e-4},
        model_input_format="unpack_dict",
        sample_batch=make_batch(),
        load_strategy=[("parallel_mode", ([("tensor", dist.get_world_size())], None)), "tensor_parallel"],
    )
    assert result is not None
    model, optim, _, loss, _, _ = result
    batch = make_batch()

    def step() -> None:
        loss(batch, model(**batch)).backward()
        optim.step()
        optim.zero_grad()

    return step


def collectives(step: Step) -> int:
    """Number of collectives in a step."""
    with CommCounter() as sent:
        step()
    return sum(calls for calls, _ in sent.counts.values())


def in_process(width: int, rounds: int) -> list[tuple[Any, ...]] | None:
    rank = as_rank()
    hand, ours = by_hand(width), by_atorch(width)
    sent = collectives(ours), collectives(hand)
    samples = interleave({"hand": hand, "hand again": by_hand(width), "atorch": ours}, rounds)
    if rank != 0:
        return None
    ratio, null = samples.ratio("atorch", "hand"), samples.ratio("hand again", "hand")
    title = f"tensor_parallel on 2 processes, width {width} ({samples.median_ms('hand'):.1f} ms a step by hand)"
    return [
        (f"{title}: atorch / parallelize_module", f"{ratio:.3f}", f"≤ {BAR}", ratio.value <= BAR),
        (f"{title}: by hand again / by hand", f"{null:.3f}", "", None),
        (f"{title}: collectives of a step, atorch and by hand", f"{sent[0]} and {sent[1]}", "", None),
    ]


def measure(quick: bool = False) -> list[Row]:
    rounds = 20 if quick else 100
    return [Row(*row) for width in (64, 256) for row in answer_of(__file__, width, rounds)]


if __name__ == "__main__":
    main(measure, in_process=in_process)
