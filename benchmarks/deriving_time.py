"""Time to derive a tensor-parallel layout at the sizes of real models: ≤ 20 s on two cores for Llama 3.1 8B.

Llama 3.1 8B and T5 large run on two processes of one thread each. Mixtral 8x7B, for information, has blocks too large
for two. It runs on one process of two threads, which tries the layout as each of eight ranks. Models have two blocks,
since one block of a kind is examined; embeddings and heads are whole. The time covers all of `auto_accelerate`, with
the model in bf16 on the CPU: comparing models, two evaluations, deriving, the replay with real collectives, the cut.

    python benchmarks/deriving_time.py [--quick]
"""

from __future__ import annotations

import resource
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn
from transformers.initialization import no_init_weights

sys.path.insert(0, str(Path(__file__).parent))
from command import answer_of, main
from compare import Row

from atorch import auto_accelerate
from atorch.auto.job import make_context
from atorch.auto.opt_lib.tensor_parallel import TensorParallel
from atorch.cluster.spec import ClusterSpec
from atorch.distributed import world as worlds

BAR_S = 20.0
BATCH = 3
RUNS = 3

# The shapes of Llama 3.1 8B: Llama Team 2024, arXiv 2407.21783, table 3; of Mixtral 8x7B: Jiang et al. 2024, arXiv
# 2401.04088, table 1; of T5 large: Raffel et al. 2020, arXiv 1910.10683, section 3.7.
SHAPES: dict[str, dict[str, Any]] = {
    "Llama 3.1 8B": {
        "config": "LlamaConfig", "model": "LlamaForCausalLM", "processes": 2,
        "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 2,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192,
    },
    "T5 large": {
        "config": "T5Config", "model": "T5ForConditionalGeneration", "processes": 2,
        "vocab_size": 32128, "d_model": 1024, "d_ff": 4096, "num_layers": 2, "num_heads": 16, "d_kv": 64,
    },
    "Mixtral 8x7B": {
        "config": "MixtralConfig", "model": "MixtralForCausalLM", "processes": None,
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 2,
        "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2,
    },
}  # fmt: skip

CASES = (("Llama 3.1 8B", 128), ("Llama 3.1 8B", 2048), ("T5 large", 2048), ("Mixtral 8x7B", 2048))


def make_model(name: str) -> nn.Module:
    """The model in bf16. One million random numbers are repeated: drawing all weights would take too long."""
    sizes = {key: value for key, value in SHAPES[name].items() if key not in ("config", "model", "processes")}
    config = getattr(transformers, SHAPES[name]["config"])(**sizes, use_cache=False)
    with no_init_weights():
        model: nn.Module = getattr(transformers, SHAPES[name]["model"])._from_config(config, dtype=torch.bfloat16)
    numbers = (0.02 * torch.randn(2**20)).to(torch.bfloat16)
    for parameter in model.parameters():
        for part in parameter.detach().view(-1).split(len(numbers)):
            part.copy_(numbers[: len(part)])
    return model


def make_batch(name: str, length: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(2, SHAPES[name]["vocab_size"], (BATCH, length), generator=generator)
    return {"input_ids": tokens, "decoder_input_ids": tokens.clone()} if "T5" in name else {"input_ids": tokens}


class Stopwatch:
    """Wall-clock seconds, and CPU seconds of this process."""

    def __enter__(self) -> Stopwatch:
        self._start = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *raised: object) -> None:
        self.wall_s, self.cpu_s = time.perf_counter() - self._start[0], time.process_time() - self._start[1]


def on_processes(name: str, length: int) -> Stopwatch:
    """Time `auto_accelerate` on all started processes."""
    torch.set_num_threads(1)
    model, batch = make_model(name), make_batch(name, length)
    dist.init_process_group("gloo")
    with Stopwatch() as watch:
        auto_accelerate(
            model,
            model_input_format="unpack_dict",
            sample_batch=batch,
            load_strategy=[("parallel_mode", ([("tensor", dist.get_world_size())], None)), "tensor_parallel"],
        )
    return watch


def as_one_process(name: str, length: int) -> Stopwatch:
    """Time the derivation in a plan for 8 processes, on this process alone."""
    torch.set_num_threads(2)
    model, batch = make_model(name), make_batch(name, length)
    world = worlds.init()
    cluster = ClusterSpec.detect(world, measure=False)
    ctx = make_context(model, model_input_format="unpack_dict", world=world, cluster=cluster)
    with Stopwatch() as watch:
        TensorParallel().trace_metadata(replace(ctx, sample_batch=batch), {"tensor": 8})
    return watch


def in_process(name: str, length: int) -> tuple[float, float, float] | None:
    """Wall-clock seconds, CPU seconds, and peak GiB of the first process."""
    watch = (on_processes if SHAPES[name]["processes"] else as_one_process)(name, length)
    if dist.is_initialized() and dist.get_rank() != 0:
        return None
    return watch.wall_s, watch.cpu_s, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def measure(quick: bool = False) -> list[Row]:
    rows = []
    for name, length in CASES:
        processes = SHAPES[name]["processes"]
        runs = [
            answer_of(__file__, name, length, processes=processes, timeout_s=1800) for _ in range(1 if quick else RUNS)
        ]
        wall_s, cpu_s, gib = (statistics.median(figures) for figures in zip(*runs, strict=True))
        how = f"{processes} processes" if processes else "one process as 8"
        title = f"deriving the layout of {name} on {how}, from sequences of {length} tokens, seconds"
        title += f" ({cpu_s:.1f} computing in one process, which held {gib:.1f} GiB)"
        bar = (f"≤ {BAR_S:.0f}", wall_s <= BAR_S) if processes else ("", None)
        rows.append(Row(title, f"{wall_s:.1f}", *bar))
    return rows


if __name__ == "__main__":
    main(measure, in_process=in_process)
