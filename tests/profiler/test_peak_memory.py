"""Peaks of memory on the CPU, as the operating system sees them."""

import torch

from atorch.profiler.peak_memory import PeakMemory

MiB = 2**20


def test_the_peak_is_what_was_taken_at_most():
    memory = PeakMemory(torch.device("cpu"))
    with memory.watching():
        taken = torch.ones(64 * MiB // 4)
        del taken
        torch.ones(2 * MiB // 4)
        kept = torch.ones(32 * MiB // 4)
    assert memory.kind == "resident set growth"
    # The first 64 MiB may be gone before they are sampled; what is there at the end is always seen.
    assert 31 * MiB < memory.peak_bytes < 110 * MiB
    assert kept[0] == 1
