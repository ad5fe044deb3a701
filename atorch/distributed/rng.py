"""Saves and restores the states of random number generators."""

from __future__ import annotations

import ctypes
import functools
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class RandomState:
    """States of Python's, numpy's and torch's generators (CPU, CUDA)."""

    python: Any
    numpy: Any
    host: torch.Tensor
    devices: tuple[torch.Tensor, ...]

    @classmethod
    def now(cls, only: torch.device | None = None) -> RandomState:
        """The current states; `only`: those of the host and this device, whatever its index."""
        if only is None:
            cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        else:
            cuda = [torch.cuda.get_rng_state(only)] if only.type == "cuda" else []
        return cls(random.getstate(), _of_numpy(), torch.get_rng_state(), tuple(cuda))

    def restore(self, only: torch.device | None = None) -> None:
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        _numpy_once.cache_clear()
        torch.set_rng_state(self.host)
        for number, state in enumerate(self.devices):
            torch.cuda.set_rng_state(state, number if only is None else only)

    def is_same(self, other: RandomState) -> bool:
        own, others = (self.host, *self.devices), (other.host, *other.devices)
        return (
            self.python == other.python
            and (self.numpy is other.numpy or all(map(np.array_equal, self.numpy, other.numpy)))
            and len(own) == len(others)
            and all(map(torch.equal, own, others))
        )


def _of_numpy() -> Any:
    """numpy's state. Reading it takes 0.25 ms, so it is cached until the memory of the generator changes."""
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if not isinstance(generator, np.random.MT19937):
        return np.random.get_state()
    state: Any = _numpy_once(ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES))
    # numpy keeps a second, already drawn Gaussian outside that memory (state[3] is set): then the cache may be stale.
    return np.random.get_state() if state[3] else state


_MT19937_BYTES = 4 * 625  # 624 words of state and the position among them


@functools.lru_cache(maxsize=1)
def _numpy_once(memory: bytes) -> Any:
    return np.random.get_state()


@contextmanager
def preserved_rng() -> Iterator[None]:
    """Restores all generators at the end, as if nothing had been drawn inside."""
    state = RandomState.now()
    try:
        yield
    finally:
        state.restore()
