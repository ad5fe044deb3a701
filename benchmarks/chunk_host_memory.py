"""Host memory of training in chunks: bytes a parameter that the process holds between two steps.

Trains a GPT-2 of 124 million parameters in bf16 with fp32 masters and fused Adam, each way in its own process. The
figure is the growth of resident memory from before the model is made to after the third step, with all chunks off the
device. Parameters and gradients take 2 bytes each, masters 4, Adam's states 8. With `in_place`, gradients replace
parameters in memory: 14 in all.

    python benchmarks/chunk_host_memory.py [--quick]
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from pathlib import Path

import torch
import transformers
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from command import answer_of, main
from compare import Row

from atorch.auto.opt_lib.chunk.trace import trace_pass
from atorch.runtime.chunk.chunk_optimizer import ChunkOptimizer
from atorch.runtime.chunk.chunked import chunk

VOCAB, SEQ = 50257, 32
BARS = {False: 16.5, True: 14.5}  # bytes a parameter, by `in_place`


def make_model(layers: int) -> nn.Module:
    config = transformers.GPT2Config(
        n_layer=layers, vocab_size=VOCAB, n_positions=SEQ, use_cache=False, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=batch).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch.flatten())


def resident_bytes() -> int:
    """Resident memory of the process, after its allocator returned its free memory."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def train(layers: int, in_place: bool) -> tuple[int, nn.Module, ChunkOptimizer]:
    """Train three steps. Returns the number of parameters, and objects that must live while memory is counted."""
    model, batch = make_model(layers), torch.randint(0, VOCAB, (1, SEQ))
    count = sum(parameter.numel() for parameter in model.parameters())
    accesses = trace_pass(model, batch, loss_of, device_type="cpu", dtype=torch.bfloat16)
    most = max(access.other_bytes for access in accesses.accesses)
    operations = chunk(
        model, accesses, most + 2 * count, device=torch.device("cpu"), dtype=torch.bfloat16, in_place=in_place
    )
    optimizer = ChunkOptimizer(
        lambda groups: torch.optim.Adam(groups, lr=1e-4, fused=True), model.parameters(), operations.chunks
    )
    for _ in range(3):
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    operations.residency.begin()  # a pass starts by dropping all chunks from the device
    return count, model, optimizer


def in_process(layers: int, in_place: bool) -> float:
    """Growth of resident memory, in bytes a parameter."""
    torch.set_num_threads(1)
    train(1, in_place)  # so that one-time allocations of libraries are not counted
    before = resident_bytes()
    count, *alive = train(layers, in_place)
    after = resident_bytes()
    del alive
    return (after - before) / count


def measure(quick: bool = False) -> list[Row]:
    rows = []
    for in_place, bar in BARS.items():
        num_bytes = answer_of(__file__, 2 if quick else 12, in_place, processes=None)
        title = "gradients in the parameters' place" if in_place else "gradients beside parameters"
        rows.append(
            Row(f"host memory in bf16 with masters, {title}: bytes a parameter", f"{num_bytes:.2f}", f"≤ {bar}",
                num_bytes <= bar)
        )  # fmt: skip
    return rows


if __name__ == "__main__":
    main(measure, in_process=in_process)
