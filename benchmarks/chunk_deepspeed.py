"""A training step in chunks against DeepSpeed's ZeRO-Offload, on the same model, processes and threads.

The model is a Llama in bf16 with fp32 masters and Adam, on one process and on two. Stage 2 offloads the optimizer and
keeps all 16-bit parameters on the device. Against it, chunks get room for the activations and all parameters. Stage 3
also offloads the parameters and fetches them for use. Against it, chunks get room for half of the parameters.
On a CPU, device and host share one memory: the ratio compares how the work is done, not how links are used.
Steps run interleaved in a shuffled order, and both must train alike.

    DS_ACCELERATOR=cpu python benchmarks/chunk_deepspeed.py [--quick]

If DeepSpeed is not installed, the row says so. DeepSpeed compiles its kernel at its first use.
"""

from __future__ import annotations

import importlib.util
import os
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
from atorch.auto.opt_lib.chunk.trace import trace_pass

SHARES = {2: 1.1, 3: 0.5}  # of the parameters that fit in chunks' budget, by DeepSpeed's stage
LEARNING_RATE = 1e-4

Step = Callable[[], float]


def loss_of(model: Any, batch: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=batch).logits[:, :-1]
    return nn.functional.cross_entropy(logits.reshape(-1, VOCAB).float(), batch[:, 1:].reshape(-1))


def batch_of(rank: int, rows: int) -> torch.Tensor:
    return make_tokens(rows * dist.get_world_size())[rank * rows : (rank + 1) * rows]


def in_chunks(width: int, layers: int, batch: torch.Tensor, share: float) -> Step:
    """The documented loop's step, with room for activations and a share of the parameters."""
    model = make_model(width, layers)
    accesses = trace_pass(model, batch, loss_of, device_type="cpu", dtype=torch.bfloat16).accesses
    most = max(access.other_bytes for access in accesses)
    room = share * 2 * sum(parameter.numel() for parameter in model.parameters())
    _, result, _ = auto_accelerate(
        model,
        torch.optim.Adam,
        loss_func=lambda batch, output: nn.functional.cross_entropy(
            output.logits[:, :-1].reshape(-1, VOCAB).float(), batch["input_ids"][:, 1:].reshape(-1)
        ),
        optim_args={"lr": LEARNING_RATE, "fused": True},
        model_input_format="unpack_dict",
        sample_batch={"input_ids": batch},
        load_strategy=[("half", "bf16"), ("chunk", {"budget_bytes": int(most + room), "hybrid": False, "prefetch": 4})],
    )
    assert result is not None
    given = {"input_ids": batch}

    def step() -> float:
        loss = result.loss_func(given, result.model(**given))
        loss.backward()
        result.optim.step()
        result.optim.zero_grad()
        return loss.item()

    return step


def by_deepspeed(width: int, layers: int, batch: torch.Tensor, stage: int) -> Step:
    """The same step with ZeRO-Offload."""
    import deepspeed

    model = make_model(width, layers)
    zero: dict[str, Any] = {"stage": stage, "offload_optimizer": {"device": "cpu"}}
    if stage == 3:
        zero["offload_param"] = {"device": "cpu"}
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=list(model.parameters()),
        config={
            "train_micro_batch_size_per_gpu": len(batch),
            "bf16": {"enabled": True},
            "optimizer": {"type": "Adam", "params": {"lr": LEARNING_RATE, "adam_w_mode": False}},
            "zero_optimization": zero,
        },
    )

    def step() -> float:
        loss = loss_of(engine, batch)
        engine.backward(loss)
        engine.step()
        return loss.item()

    return step


def in_process(stage: int, quick: bool) -> list[tuple[Any, ...]] | None:
    os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed requires it
    rank = as_rank()
    width, layers, rows = (64, 2, 2) if quick else (512, 6, 4)
    batch = batch_of(rank, rows)
    steps = {
        "deepspeed": by_deepspeed(width, layers, batch, stage),
        "chunks": in_chunks(width, layers, batch, SHARES[stage]),
    }
    for _ in range(3):
        losses = {name: step() for name, step in steps.items()}
    assert abs(losses["chunks"] / losses["deepspeed"] - 1) < 0.02, f"both train alike: {losses}"
    samples = interleave(steps, 3 if quick else 15, warmup=1)
    if rank != 0:
        return None
    count = sum(parameter.numel() for parameter in make_model(width, layers).parameters())
    ratio = samples.ratio("deepspeed", "chunks")
    title = f"ZeRO-Offload stage {stage}, {dist.get_world_size()} processes, {count / 1e6:.0f}M parameters"
    title += f" ({samples.median_ms('deepspeed'):.0f} ms a step)"
    return [(f"{title}: DeepSpeed's step ÷ step in chunks", f"{ratio:.2f}", "> 1", ratio.value > 1)]


def measure(quick: bool = False) -> list[Row]:
    if importlib.util.find_spec("deepspeed") is None:
        return [Row("chunks against ZeRO-Offload", "deepspeed is not installed: skipped", "")]
    cases = [(processes, stage) for processes in (1, 2) for stage in SHARES]
    return [Row(*row) for processes, stage in cases for row in answer_of(__file__, stage, quick, processes=processes)]


if __name__ == "__main__":
    main(measure, in_process=in_process)
