"""Adam on the host: parameters a second of `ChunkOptimizer`, against DeepSpeedCPUAdam and torch's Adam.

All ways step the same parameters, those of a GPT-2 of four blocks, in fp32 with fp32 gradients. They run in one
process, interleaved in a shuffled order. In mixed precision, chunks also widen 16-bit gradients and round masters. The
other ways copy each tensor around the step, as frameworks do. If DeepSpeed is not installed, its row says so.

    DS_ACCELERATOR=cpu python benchmarks/chunk_adam.py [--quick]

DeepSpeed compiles its kernel at its first use.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
from command import main
from compare import Row, Samples, interleave

from atorch.runtime.chunk.chunk_optimizer import ChunkOptimizer
from atorch.runtime.chunk.layout import Item, search
from atorch.runtime.chunk.memory import ChunkSet

BAR = 0.97
CHUNKS = 8

Step = Callable[[], object]


def make_model(quick: bool) -> nn.Module:
    """A GPT-2 of 36 million parameters, or of a hundredth of that if `quick`."""
    torch.manual_seed(0)
    width = 64 if quick else 768
    tokens = {"vocab_size": 10 * width, "bos_token_id": 0, "eos_token_id": 0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=width, n_layer=4, n_head=4, **tokens))


def in_chunks(quick: bool, dtype: torch.dtype | None = None, **how: Any) -> Step:
    """A step of Adam on chunks that have all their gradients."""
    model = make_model(quick)
    parameters = dict(model.named_parameters())
    items = [Item(name, value.numel(), str(value.dtype), True) for name, value in parameters.items()]
    layout = search(items, lambda filling: float(abs(len(filling.numels) - CHUNKS)))
    chunks = ChunkSet(layout, parameters, dtype=dtype)
    optim = ChunkOptimizer(lambda groups: torch.optim.Adam(groups, **how), parameters.values(), chunks)
    for memory in chunks.chunks:
        for slot in memory.spec.slots:
            memory.accumulate(slot, gradient_of(parameters[slot.name], memory.dtype))
    return optim.step


def by_parameter(quick: bool, make: Callable[[list[Tensor]], Any], dtype: torch.dtype | None = None) -> Step:
    """A step of an optimizer on the same parameters one by one; `dtype` adds copies of 16-bit weights and gradients."""
    masters = [nn.Parameter(value.detach()) for value in make_model(quick).parameters()]
    for master in masters:
        master.grad = gradient_of(master, torch.float32)
    optim = make(masters)
    if dtype is None:
        return optim.step
    weights = [master.detach().to(dtype) for master in masters]
    gradients = [gradient_of(master, dtype) for master in masters]

    def step() -> None:
        for master, gradient in zip(masters, gradients, strict=True):
            master.grad.copy_(gradient)
        optim.step()
        for master, weight in zip(masters, weights, strict=True):
            weight.copy_(master.detach())

    return step


def gradient_of(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def by_deepspeed(params: list[Tensor]) -> Any:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam(params, adamw_mode=False)


def fused(params: list[Tensor]) -> Any:
    return torch.optim.Adam(params, fused=True)


def measure(quick: bool = False) -> list[Row]:
    count = sum(parameter.numel() for parameter in make_model(quick).parameters())
    has_deepspeed = importlib.util.find_spec("deepspeed") is not None
    rounds = 3 if quick else 31
    half = torch.bfloat16
    variants = {
        "chunks, fused": in_chunks(quick, fused=True),
        "torch, fused": by_parameter(quick, fused),
        "chunks": in_chunks(quick),
        "torch": by_parameter(quick, torch.optim.Adam),
        **({"DeepSpeedCPUAdam": by_parameter(quick, by_deepspeed)} if has_deepspeed else {}),
    }
    mixed = {
        "chunks, fused": in_chunks(quick, half, fused=True),
        "torch, fused": by_parameter(quick, fused, half),
        **({"DeepSpeedCPUAdam": by_parameter(quick, by_deepspeed, half)} if has_deepspeed else {}),
    }
    title = f"host Adam, {count / 1e6:.0f}M parameters, {torch.get_num_threads()} threads"
    return [
        *rows(f"{title}, fp32", interleave(variants, rounds, warmup=2), count, BAR),
        *rows(f"{title}, {half} with masters", interleave(mixed, rounds, warmup=2), count, None),
    ]


def rows(title: str, samples: Samples, count: int, bar: float | None) -> list[Row]:
    """The rate of each way, and its ratio to the rate of DeepSpeed or of torch."""
    rates = "; ".join(f"{name} {count / samples.median_ms(name) / 1e6:.3f}" for name in samples.seconds)
    made = [Row(f"{title}: 10⁹ parameters a second", rates, "")]
    if "DeepSpeedCPUAdam" in samples.seconds:
        ratio = samples.ratio("DeepSpeedCPUAdam", "chunks, fused")
        holds = None if bar is None else ratio.value >= bar
        made.append(
            Row(f"{title}: rate of chunks, fused / DeepSpeedCPUAdam", f"{ratio:.3f}", f"≥ {bar}" if bar else "", holds)
        )
    else:
        made.append(
            Row(f"{title}: rate of chunks, fused / DeepSpeedCPUAdam", "deepspeed is not installed: skipped", "")
        )
    for mine, theirs in (("chunks, fused", "torch, fused"), ("chunks", "torch")):
        if mine in samples.seconds:
            made.append(
                Row(f"{title}: rate of {mine} / {theirs} by parameter", f"{samples.ratio(theirs, mine):.3f}", "")
            )
    return made


if __name__ == "__main__":
    main(measure)
