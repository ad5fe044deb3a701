"""Absolute step times and peak memory of each method on a 1B-parameter Llama, beside hand-written torch.

Needs a CUDA GPU; without one it says so and measures nothing. Each variant runs in a process of its own, so that its
peak memory is its own; hand-written torch runs before and after.

    python benchmarks/gpu_methods.py
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from command import answer_of, main
from compare import Row

BATCH, SEQ, STEPS, WARMUP = 4, 2048, 12, 4
VARIANTS: dict[str, list[Any] | None] = {
    "hand fp32": None,
    "plain": [],
    "amp_native bf16": [("amp_native", "bf16")],
    "half bf16": [("half", "bf16")],
    "amp + checkpoint": [("amp_native", "bf16"), "checkpoint"],
    "amp + compile": [("amp_native", "bf16"), "compile"],
    "amp + module_replace": [("amp_native", "bf16"), "module_replace"],
    "amp + micro_batch": [("amp_native", "bf16"), ("micro_batch", {"size": 1})],
    "amp + fsdp": [("amp_native", "bf16"), "fsdp"],
    "amp + zero2": [("amp_native", "bf16"), "zero2"],
    "amp + zero1": [("amp_native", "bf16"), "zero1"],
    "amp + fp8": [("amp_native", "bf16"), ("fp8", {"exclude": ["lm_head"]}), "compile"],
    "hand amp bf16": None,
}


def make_model() -> torch.nn.Module:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=22, num_attention_heads=32,
        num_key_value_heads=4, max_position_embeddings=SEQ, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def loss_func(batch: Any, output: Any) -> torch.Tensor:
    return output["loss"]


def in_process(name: str) -> dict[str, float]:
    """One variant's median step and peak memory."""
    device = torch.device("cuda")
    tokens = torch.randint(0, 32000, (BATCH, SEQ), device=device)
    batch = {"input_ids": tokens, "labels": tokens}
    strategy = VARIANTS[name]
    model = make_model()
    if strategy is None:
        model = model.to(device)
        optim: Any = torch.optim.AdamW(model.parameters(), lr=1e-5)
        loss = loss_func
    else:
        from atorch import auto_accelerate

        _, result, _ = auto_accelerate(
            model, torch.optim.AdamW, loss_func=loss_func, optim_args={"lr": 1e-5}, model_input_format="unpack_dict",
            load_strategy=strategy,
        )  # fmt: skip
        assert result is not None
        model, optim, loss = result.model, result.optim, result.loss_func
    amp = torch.autocast("cuda", torch.bfloat16, enabled=name == "hand amp bf16")
    times = []
    for _ in range(WARMUP + STEPS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        with amp:
            value = loss(batch, model(**batch))
        value.backward()
        optim.step()
        optim.zero_grad()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    steady = sorted(times[WARMUP:])
    return {"ms": steady[len(steady) // 2], "gib": torch.cuda.max_memory_allocated() / 2**30}


def measure(quick: bool = False) -> list[Row]:
    """All rows of this claim; one that informs where there is no GPU."""
    if not torch.cuda.is_available():
        return [Row("absolute step times on a GPU", "no CUDA GPU here", "")]
    rows = []
    for name in VARIANTS:
        try:
            figures = answer_of(__file__, name, processes=None, timeout_s=600)
        except subprocess.CalledProcessError as error:
            rows.append(Row(f"1B Llama, {name}", f"failed: {error.stderr.strip().splitlines()[-1]}", "runs", False))
            continue
        rows.append(Row(f"1B Llama, {name}", f"{figures['ms']:.1f} ms, {figures['gib']:.2f} GiB", ""))
    return rows


if __name__ == "__main__":
    main(measure, in_process=in_process)
