"""What waits for copies to a device: the gathering of what was copied, and not computation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from atorch.runtime.chunk import residency
from atorch.runtime.chunk.residency import Residency
from atorch.runtime.chunk.transfer import OnStream
from tests.operations import Watch


class Stream:
    """As much of a CUDA stream as says who waits for whom."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for {event}")

    def record_event(self) -> str:
        return f"what {self.name} has done"


@contextmanager
def streams(log: list[str]) -> Iterator[None]:
    """Inside, torch.cuda has streams, whose copies are logged by the stream that is current."""
    current = [Stream("compute", log)]

    def now(device: torch.device) -> Stream:
        return current[-1]

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    def gather(whole: Tensor, own: Tensor, **_: Any) -> Any:
        log.append(f"gather after {current[-1].name}")
        return SimpleNamespace(wait=lambda: log.append(f"{current[-1].name} waits for the gather"))

    with (
        mock.patch.object(torch.cuda, "Stream", side_effect=[Stream("down", log), Stream("up", log)]),
        mock.patch.object(torch.cuda, "stream", on),
        mock.patch.object(torch.cuda, "current_stream", now),
        mock.patch.object(residency, "all_gather_single", gather),
    ):
        yield


def test_a_shared_chunk_is_gathered_after_its_copy_and_computation_waits_when_it_needs_it() -> None:
    log: list[str] = []
    memory = SimpleNamespace(
        spec=SimpleNamespace(numel=8, slots=()), share=slice(4, 8), dtype=torch.float32, compute=torch.ones(4),
        writes=0, prepare=lambda: None, follow=lambda: None,
    )  # fmt: skip
    chunks: Any = SimpleNamespace(chunks=[memory], group=object(), device=torch.device("meta"))
    step = SimpleNamespace(evict=(), fetch=(), prefetch=(0,))
    steps = iter([step, SimpleNamespace(evict=(), fetch=(), prefetch=())])
    course: Any = SimpleNamespace(next=lambda *_: next(steps), begin=lambda: None, other_bytes=0)
    parameters: dict[str, nn.Parameter] = {}
    with streams(log), Watch(lambda func, *_: log.append("copy") if func is torch.ops.aten.copy_.default else None):
        held = Residency(chunks, parameters, 1000, course, OnStream(torch.device("cuda")))
        held.need("an operation before it", frozenset())
        assert log == ["down waits for compute", "copy", "gather after down"]
        held.need("what it is for", frozenset((0,)))
    assert log[3:] == ["compute waits for the gather"]
