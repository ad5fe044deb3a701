"""Cost of checking a strategy against plain training's first pass, in plain steps on the same global batch.

Calls `auto_accelerate` with one `load_strategy`, with `verify` and without, on fresh models, in turns with plain steps.
The cost is the difference of the calls over a plain step. It covers a plain pass, a pass of the strategy, and two
forward passes for evaluation. If random numbers make passes depend on how a batch is divided, each pass runs twice.

    python benchmarks/first_pass.py [--quick]
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from command import answer_of, as_rank, main
from compare import Interval, Row, Samples

from atorch import auto_accelerate

VOCAB, SEQ, BATCH, BAR = 512, 128, 8, 8.0
CASES = {
    "amp_native": (1, [("amp_native", "bf16")], 0.0),
    "checkpoint": (1, ["checkpoint"], 0.0),
    "checkpoint, with dropout": (1, ["checkpoint"], 0.1),
    "fsdp on 2 processes": (2, ["fsdp"], 0.0),
    "zero1 on 2 processes, with dropout": (2, ["zero1"], 0.1),
}


def make_model(dropout: float) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_positions=SEQ, n_embd=256, n_layer=4, n_head=4,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, use_cache=False,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def samples() -> list[dict[str, torch.Tensor]]:
    tokens = torch.randint(0, VOCAB, (BATCH, SEQ), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in tokens]


def started(load_strategy: Any, dropout: float, verify: bool) -> float:
    """Seconds of one call of `auto_accelerate`."""
    model = make_model(dropout)
    began = time.perf_counter()
    auto_accelerate(
        model,
        torch.optim.AdamW,
        samples(),
        lambda batch, output: output["loss"],
        model_input_format="unpack_dict",
        dataloader_args={"batch_size": BATCH},
        load_strategy=load_strategy,
        verify=verify,
    )
    return time.perf_counter() - began


def stepped(model: nn.Module, optim: torch.optim.Optimizer, batch: dict[str, torch.Tensor]) -> float:
    """Seconds of one plain step."""
    began = time.perf_counter()
    model(**batch)["loss"].backward()
    optim.step()
    optim.zero_grad()
    return time.perf_counter() - began


def on_rank(load_strategy: Any, dropout: float, rounds: int, processes: int) -> dict[str, list[float]] | None:
    """Seconds of both calls and of a plain step, by round, on rank 0."""
    torch.set_num_threads(1)
    rank = as_rank() if processes > 1 else 0
    model = make_model(dropout)
    optim = torch.optim.AdamW(model.parameters())
    rows = samples()
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    seconds: dict[str, list[float]] = {"with": [], "without": [], "step": []}
    for number in range(rounds + 1):
        order = [True, False] if number % 2 else [False, True]
        found = {verify: started(load_strategy, dropout, verify) for verify in order}
        if dist.is_initialized():
            dist.barrier()
        step = stepped(model, optim, batch)
        if number:  # the first round warms up
            seconds["with"].append(found[True])
            seconds["without"].append(found[False])
            seconds["step"].append(step)
    return seconds if rank == 0 else None


def measure(quick: bool = False) -> list[Row]:
    """One row for each case."""
    import numpy as np

    rows = []
    for name, (processes, load_strategy, dropout) in CASES.items():
        given = (load_strategy, dropout, 2 if quick else 15, processes)
        found = Samples({key: np.array(values) for key, values in answer_of(
            __file__, *given, processes=processes if processes > 1 else None).items()})  # fmt: skip
        cost: Interval = found.interval(
            lambda picked: float(np.median(picked["with"] - picked["without"]) / np.median(picked["step"]))
        )
        rows.append(Row(f"verifying {name}: plain steps", f"{cost:.1f}", f"≤ {BAR:g}", cost.value <= BAR))
    return rows


if __name__ == "__main__":
    main(measure, in_process=on_rank)
