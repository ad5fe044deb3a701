"""Balance of automatic pipeline cuts, by traced cost: GPT-2, Llama and T5 on 2, 4 and 8 stages.

Traces models of published shapes on the meta device, with 4 sequences in bfloat16; the planner estimates each unit's
seconds on an H100. The cut is compared with the best of all cuts, found by trying every one. It is also compared with
two lower bounds: the mean stage, and the largest unit. With few blocks a stage, no cut between blocks comes near these
bounds. Rows without a bar are of a model whose best cut on 8 stages misses the bar.

    python benchmarks/pipeline_cut.py
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parent))
from command import main
from compare import Row

if TYPE_CHECKING:
    from torch import nn

STAGES = (2, 4, 8)
SEQUENCES = 4


def gpt2() -> tuple[nn.Module, int]:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(use_cache=False)), 1024


def llama(vocab: int, hidden: int, ffn: int, blocks: int, kv_heads: int, tokens: int) -> tuple[nn.Module, int]:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = LlamaConfig(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=ffn, num_hidden_layers=blocks, num_attention_heads=32,
        num_key_value_heads=kv_heads, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(shape), tokens


def t5(hidden: int, ffn: int, blocks: int, heads: int) -> tuple[nn.Module, int]:
    from transformers import T5Config, T5ForConditionalGeneration

    shape = T5Config(
        d_model=hidden, d_ff=ffn, num_layers=blocks, num_heads=heads, decoder_start_token_id=0, use_cache=False
    )
    return T5ForConditionalGeneration(shape), 512


MODELS: dict[str, Callable[[], tuple[nn.Module, int]]] = {
    "GPT-2": gpt2,
    "TinyLlama-1.1B": lambda: llama(32000, 2048, 5632, 22, 4, 2048),
    "T5-base": lambda: t5(768, 3072, 12, 12),
}
FEW_BLOCKS: dict[str, Callable[[], tuple[nn.Module, int]]] = {
    "Llama-3.1-8B": lambda: llama(128256, 4096, 14336, 32, 8, 8192),
}


def measure(quick: bool = False) -> list[Row]:
    """All rows of this claim; `quick` leaves out the rows for information."""
    rows: list[Row] = []
    for name, make in MODELS.items():
        costs = traced_costs(make)
        for stages in STAGES:
            slowest, seconds = timed_cut(costs, stages)
            optimum = slowest / best_of_all(costs, stages)
            least = slowest / max(sum(costs) / stages, max(costs))
            title = f"{name}, {len(costs)} units on {stages} stages: the slowest against"
            rows.append(Row(f"{title} the best of all cuts", f"{optimum:.3f}", "≤ 1.02", optimum <= 1.02))
            rows.append(Row(f"{title} the larger of mean and unit", f"{least:.3f}", "≤ 1.10", least <= 1.10))
            print(f"{name}, {stages} stages: cut in {seconds * 1e3:.1f} ms", file=sys.stderr)
    for name, make in {} if quick else FEW_BLOCKS.items():
        costs = traced_costs(make)
        for stages in STAGES:
            slowest, _ = timed_cut(costs, stages)
            title = f"{name}, {len(costs)} units on {stages} stages: the slowest against the larger of mean and unit"
            rows.append(Row(title, f"{slowest / max(sum(costs) / stages, max(costs)):.3f}", ""))
    return rows


def traced_costs(make: Callable[[], tuple[nn.Module, int]]) -> list[float]:
    """Seconds of each unit in the order of execution."""
    import torch

    from atorch.cluster.spec import ClusterSpec
    from atorch.profiler.unit_costs import unit_costs

    with torch.device("meta"):
        model, tokens = make()
    ids = torch.zeros(SEQUENCES, tokens, dtype=torch.long)
    device = ClusterSpec.load("8xH100-80GB").device
    units = unit_costs(
        model,
        {"input_ids": ids, "labels": ids},
        lambda model, batch: model(**batch),
        lambda batch, output: output.loss,
        device,
        fold=lambda cost: cost.replace(dtype="bfloat16"),
    )
    return [unit.seconds for unit in units]


def timed_cut(costs: Sequence[float], stages: int) -> tuple[float, float]:
    """(the slowest stage of the cut, seconds that cutting took)."""
    from atorch.runtime.pipeline.capture.partition import partition

    start = time.perf_counter()
    starts = partition(costs, stages)
    seconds = time.perf_counter() - start
    return max(sum(costs[a:b]) for a, b in itertools.pairwise((*starts, len(costs)))), seconds


def best_of_all(costs: Sequence[float], stages: int) -> float:
    """The slowest stage of the best of all cuts, by brute force."""
    before: Any = [0.0, *itertools.accumulate(costs)]
    return min(
        max(before[b] - before[a] for a, b in itertools.pairwise((0, *starts, len(costs))))
        for starts in itertools.combinations(range(1, len(costs)), stages - 1)
    )


if __name__ == "__main__":
    main(measure)
