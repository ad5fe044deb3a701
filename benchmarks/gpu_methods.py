"""Absolute step times and peak memory of each method on a 1B-parameter Llama, against torch written by hand.

Needs a CUDA GPU; without one it says so and measures nothing. Each variant runs for at most eight minutes in its own
process, so that its peak memory is its own. Its row is printed at once: tokens a second, MFU, memory of the device and
of the host, and the planner's estimates. Methods that move bytes to the host and back also show the step over the
longer of its kernels and its copies (1.0: the shorter one is fully hidden). fp8 is measured on wide blocks.

--group measures other variants, in about four minutes each:
- search: automatic mode, with limits of 60 and 120 s, against what an expert would write: amp, amp with compiled
  blocks, and bf16 weights with compiled blocks; 8 × 2,048 tokens.
- chunk: Llamas of 7B under 60 GiB, and of 13B and 16B, which fit by chunks alone; 16 rows of 4,096 tokens (4 for 16B,
  whose parameters, gradients, masters and states leave no more room in 139 + 125 GiB); one step after the first.
- fp8: scales of tensors and of rows on wide blocks, against bf16, and what fsdp's gathers in 8 bits cost a rank in
  casts (one GPU sends nothing).

--json adds the rows to a file, and skips those that the file has. --only selects variants by name. --tiny runs
everything with a model of a few thousand parameters, also on a CPU: its figures are not results.

    python benchmarks/gpu_methods.py --json runs/gpu_methods.jsonl
    python benchmarks/gpu_methods.py --only "amp + fsdp" "by hand, amp"
    python benchmarks/gpu_methods.py --group search
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from command import answer_of, main
from compare import Row

STEPS, WARMUP, TIMEOUT_S = 12, 4, 480.0
FUSED = {"lr": 1e-5, "fused": True}
BY_HAND = "by hand"
MOVED = ("offload", "chunk")  # methods that move bytes to the host and back
VARIANTS: dict[str, list[Any] | None] = {
    "by hand, fp32": None,
    "by hand, amp": None,
    "by hand, amp + compile": None,
    "by hand, amp + checkpoint": None,
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
    "amp + offload": [("amp_native", "bf16"), "offload"],
    "amp + chunk": [("amp_native", "bf16"), "chunk"],
    "wide, amp + compile": [("amp_native", "bf16"), "compile"],
    "wide, amp + fp8 + compile": [("amp_native", "bf16"), ("fp8", {"exclude": ["lm_head"]}), "compile"],
    "by hand, amp, again": None,
}
SEARCHES: dict[str, float | None] = {
    "8 rows, by hand, amp": None,
    "8 rows, by hand, amp + compiled blocks": None,
    "8 rows, by hand, bf16 + compiled blocks": None,
    "8 rows, automatic in 60 s": 60.0,
    "8 rows, automatic in 120 s": 120.0,
}
"""Time limits of searches in seconds; None for hand-written training."""
IN_CHUNKS = [("half", "bf16"), "checkpoint", ("chunk", {"budget_fraction": 0.9})]
LARGE: dict[str, Any] = {
    "7B, half + checkpoint + chunk of 60 GiB": [*IN_CHUNKS[:2], ("chunk", {"budget_bytes": 60 * 2**30})],
    "13B, half + checkpoint + chunk": IN_CHUNKS,
    "16B, half + checkpoint + chunk": IN_CHUNKS,
}
FP8: dict[str, Any] = {
    "wide, amp + compile": VARIANTS["wide, amp + compile"],
    **{
        f"wide, amp + {scaling} fp8 + compile": [
            ("amp_native", "bf16"),
            ("fp8", {"exclude": ["lm_head"], "backend": "torchao", "scaling": scaling}),
            "compile",
        ]
        for scaling in ("tensorwise", "rowwise", "rowwise_gw_hp")
    },
    **{
        f"wide, amp + fp8 + fsdp ({bits}-bit gathers) + compile": [
            ("amp_native", "bf16"),
            ("fp8", {"exclude": ["lm_head"], "backend": "torchao", "fsdp_float8_all_gather": bits == 8}),
            "fsdp",
            "compile",
        ]
        for bits in (16, 8)
    },
}
GROUPS: Mapping[str, Mapping[str, Any]] = {"search": SEARCHES, "chunk": LARGE, "fp8": FP8}
SHAPES = {"7B": (4096, 32, 32), "13B": (5120, 40, 40), "16B": (5632, 42, 44), "wide": (4096, 5, 32)}
"""Width, layers and heads of the variants whose names begin so; others have 1.1B parameters."""


def make_model(tiny: bool, name: str) -> torch.nn.Module:
    import transformers

    torch.manual_seed(0)
    width, layers, heads = (32, 2, 4) if tiny else SHAPES.get(name.partition(",")[0], (2048, 22, 32))
    config = transformers.LlamaConfig(
        vocab_size=32000 // (500 if tiny else 1), hidden_size=width, intermediate_size=11 * width // 4,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=heads if name in LARGE else 4,
        max_position_embeddings=4096, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def filling(model: Any) -> Callable[[torch.nn.Module], None]:
    """A function that fills a module on the meta device: uniform weights, which are drawn quickly, and its buffers."""

    def fill(module: torch.nn.Module) -> None:
        if next(module.buffers(recurse=False), None) is not None:
            model._init_weights(module)
        for parameter in module.parameters(recurse=False):
            torch.nn.init.uniform_(parameter, -0.03, 0.03) if parameter.dim() > 1 else torch.nn.init.ones_(parameter)

    return fill


def loss_func(batch: Any, output: Any) -> torch.Tensor:
    return output["loss"]


def in_process(name: str, tiny: bool) -> dict[str, float]:
    """One variant's median step, its memory, and the estimates."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    is_large = name in LARGE
    with torch.device("meta") if is_large else device:  # a GPU draws weights a hundred times as fast
        model, seq = make_model(tiny, name), 16 if tiny else 4096 if is_large else 2048
    rows = 2 if tiny else 16 if is_large and "16B" not in name else 8 if name in SEARCHES else 4
    tokens = torch.randint(0, model.config.vocab_size, (rows, seq), device=device)
    batch, numel = {"input_ids": tokens, "labels": tokens}, sum(parameter.numel() for parameter in model.parameters())
    flops = (
        6.0 * numel * tokens.numel() + 12.0 * model.config.num_hidden_layers * model.config.hidden_size * rows * seq**2
    )
    strategy, loss, estimated = {**VARIANTS, **SEARCHES, **LARGE, **FP8}[name], loss_func, dict[str, Any]()
    if isinstance(strategy, float):
        began = time.perf_counter()
        data = {"dataset": [{"input_ids": row_tokens, "labels": row_tokens} for row_tokens in tokens.cpu()] * 500}
        limit, batches = 3.0 if tiny else strategy, {"dataloader_args": {"batch_size": rows}}
        model, optim, loss, chosen = accelerated(model, None, None, time_limit=limit, **data, **batches)
        estimated = {"chosen": str(chosen), "search_s": time.perf_counter() - began}
    elif strategy is None:
        model, optim = by_hand(model.to(device), name, tiny)
    else:
        strategy = [method for method in strategy if method != "compile" or not tiny]
        estimated = estimate(model, strategy, batch)
        start = {"param_init_fn": filling(model), "verify": False} if is_large else {}
        model, optim, loss, _ = accelerated(model, strategy, batch, **start)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()  # the whole model was on the device before parts moved to the host
    amp = torch.autocast(device.type, torch.bfloat16) if f"{BY_HAND}, amp" in name else nullcontext()

    def step() -> None:
        with amp:
            value = loss(batch, model(**batch))
        value.backward()
        optim.step()
        optim.zero_grad()

    step_s = median_step_s(step, device, (1, 1) if tiny or is_large else (WARMUP, STEPS))
    answer = {"ms": 1e3 * step_s, "tokens_per_s": tokens.numel() / step_s, **estimated}
    answer["host_gib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    if device.type == "cuda":
        peak = here().device.peak_flops
        answer["mfu"] = flops / step_s / peak["float32" if "fp32" in name or name == "plain" else "bfloat16"]
        answer["allocated_gib"] = torch.cuda.max_memory_allocated() / 2**30
        answer["reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
        if any(method in name for method in MOVED):
            answer["over_longest"] = step_s / longest_s(step)
    return answer


def by_hand(model: Any, name: str, tiny: bool) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """The model and a fused AdamW as one writes them without this project."""
    if "checkpoint" in name:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if "bf16" in name:
        model.bfloat16()
    if "blocks" in name and not tiny:
        for block in model.model.layers:
            block.compile()
    elif "compile" in name and not tiny:
        model.compile()
    return model, torch.optim.AdamW(model.parameters(), **FUSED)


def accelerated(
    model: torch.nn.Module, strategy: list[Any] | None, batch: Any, **more: Any
) -> tuple[Any, Any, Any, Any]:
    """The model, optimizer and loss under a strategy, and the strategy; None searches for one."""
    from atorch import auto_accelerate

    _, result, chosen = auto_accelerate(
        model, torch.optim.AdamW, loss_func=loss_func, optim_args=FUSED, model_input_format="unpack_dict",
        load_strategy=strategy, sample_batch=batch, **more,
    )  # fmt: skip
    assert result is not None
    return result.model, result.optim, result.loss_func, chosen


def here() -> Any:
    """This machine, by its data sheet."""
    from atorch.cluster.spec import ClusterSpec
    from atorch.distributed.world import init

    return ClusterSpec.detect(init(), measure=False)


def estimate(model: torch.nn.Module, strategy: list[Any], batch: Any) -> dict[str, float]:
    """Estimated step time and memory of exactly these methods."""
    from atorch.auto.plan_for_cluster import subject_of
    from atorch.auto.strategy import Strategy
    from atorch.cost import peak_memory, plain_cost, step_seconds

    cluster = here()
    profile = subject_of(
        model, batch, cluster, loss_func=loss_func, optim_func=torch.optim.AdamW, optim_args=FUSED,
        model_input_format="unpack_dict",
    ).profile  # fmt: skip
    cost = Strategy.of(strategy).cost(plain_cost(profile, device_bytes=cluster.device.memory_bytes))
    return {"estimated_ms": 1e3 * step_seconds(cost, cluster), "estimated_gib": peak_memory(cost).total / 2**30}


def median_step_s(step: Callable[[], None], device: torch.device, counts: tuple[int, int]) -> float:
    """Median time of the steps after the first few."""
    times = []
    for _ in range(sum(counts)):
        begin = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[counts[0] :])


def longest_s(step: Callable[[], None]) -> float:
    """Lower bound of a step: the longest of its kernels, its copies to the device, and those to the host."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
        step()
        torch.cuda.synchronize()
    return max(
        by_engine({event.key: 1e-6 * event.self_device_time_total for event in profiled.key_averages()}).values()
    )


def by_engine(seconds: Mapping[str, float]) -> dict[str, float]:
    """Sum the seconds of kernels and copies by the GPU's engines, which work at the same time."""
    totals = dict.fromkeys(("kernels", "HtoD", "DtoH"), 0.0)
    for name, spent in seconds.items():
        engine = next((direction for direction in ("HtoD", "DtoH") if f"Memcpy {direction}" in name), "kernels")
        totals[engine] += spent
    return totals


def measured(only: Sequence[str], tiny: bool, kept: Path | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Variants with their figures or failures, one after another; those in the file `kept` are read from it."""
    lines = kept.read_text().splitlines() if kept is not None and kept.exists() else []
    results = {figures.pop("name"): figures for figures in map(json.loads, lines)}
    for name in only or VARIANTS:
        if name not in results:
            try:
                results[name] = answer_of(__file__, name, tiny, processes=None, timeout_s=TIMEOUT_S)
            except subprocess.TimeoutExpired:
                results[name] = {"failed": f"took longer than {TIMEOUT_S:.0f} s"}
            except subprocess.CalledProcessError as error:
                results[name] = {"failed": error.stderr.strip().splitlines()[-1]}
            if kept is not None:
                kept.parent.mkdir(parents=True, exist_ok=True)
                with kept.open("a") as file:
                    file.write(json.dumps({"name": name, **results[name]}) + "\n")
        yield name, results[name]


def row(name: str, figures: dict[str, Any]) -> Row:
    """A row for the table of all benchmarks."""
    if "failed" in figures:
        return Row(f"Llama, {name}", f"failed: {figures['failed']}", "runs", False)
    parts = [f"{figures['ms']:.1f} ms", f"{figures['tokens_per_s']:,.0f} tokens/s"]
    if "mfu" in figures:
        parts += [
            f"MFU {figures['mfu']:.1%}",
            f"{figures['allocated_gib']:.2f} GiB ({figures['reserved_gib']:.2f} reserved)",
        ]
    if "host_gib" in figures:
        parts.append(f"{figures['host_gib']:.1f} GiB of the host's")
    if "estimated_ms" in figures:
        parts.append(f"estimated {figures['estimated_ms']:.1f} ms and {figures['estimated_gib']:.2f} GiB")
    if "chosen" in figures:
        parts.append(f"{figures['chosen']} after {figures['search_s']:.0f} s")
    if "over_longest" in figures:
        parts.append(f"{figures['over_longest']:.2f} × the longer of kernels and copies")
    return Row(f"Llama, {name}", ", ".join(parts), "")


def measure(quick: bool = False) -> list[Row]:
    """All rows of this claim; without a GPU, one row that says so."""
    if not torch.cuda.is_available():
        return [Row("absolute step times on a GPU", "no CUDA GPU here", "")]
    return [row(*result) for result in measured((), quick, None)]


def by_name() -> None:
    """Command line: print rows as they are measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a small model, on the CPU too")
    names = {**VARIANTS, **SEARCHES, **LARGE, **FP8}
    parser.add_argument("--only", nargs="+", choices=names, default=(), metavar="NAME", help="these variants alone")
    parser.add_argument("--group", choices=GROUPS, help="other variants; the module's docstring describes them")
    parser.add_argument("--json", type=Path, help="a file to which rows are added, and from which they are resumed")
    options = parser.parse_args()
    if not (options.tiny or torch.cuda.is_available()):
        print("no CUDA GPU here; --tiny runs on the CPU")
        return
    for name, figures in measured(tuple(GROUPS.get(options.group, options.only)), options.tiny, options.json):
        printed = row(name, figures)
        print(printed.claim, "|", printed.measured, flush=True)


if __name__ == "__main__":
    main(measure, in_process=in_process) if "--answer" in sys.argv else by_name()
