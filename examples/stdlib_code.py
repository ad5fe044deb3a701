"""The source of Python's own standard library as training text: real code, on every machine, nothing to download.

Whole files are held out, by a hash of their path, so that the split is the same on every machine and every process.
"""

from __future__ import annotations

import sysconfig
import zlib
from pathlib import Path

import torch
from torch.utils.data import Dataset

NUM_BYTES = 256  # the vocabulary: a token is a byte
END = b"\0"  # between files: no source file holds it
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test"}


class Windows(Dataset[dict[str, torch.Tensor]]):
    """Consecutive windows of `seq` bytes: sample i is `{"input_ids": (seq,) int64}`."""

    def __init__(self, text: bytes, seq: int) -> None:
        tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.windows = tokens[: len(tokens) // seq * seq].view(-1, seq)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.windows[index].long()}


def load(seq: int) -> tuple[Windows, Windows]:
    """Windows for training, and held-out windows of about every twentieth file."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = sorted(p.relative_to(root).as_posix() for p in root.rglob("*.py"))
    paths = [path for path in paths if not LEFT_OUT.intersection(path.split("/"))]
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for path in paths:
        parts[zlib.crc32(path.encode()) % 20 == 0].append((root / path).read_bytes())
    training, held_out = (Windows(END.join(files), seq) for files in parts)
    return training, held_out
