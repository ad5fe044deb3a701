"""Random states, put back as they were."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class RandomState:
    """Where Python's, numpy's and torch's generators (CPU, CUDA) stand."""

    python: Any
    numpy: Any
    host: torch.Tensor
    devices: tuple[torch.Tensor, ...]

    @classmethod
    def now(cls, only: torch.device | None = None) -> RandomState:
        """Of this moment; `only`: of this device beside the host, whatever its number."""
        if only is None:
            cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        else:
            cuda = [torch.cuda.get_rng_state(only)] if only.type == "cuda" else []
        return cls(random.getstate(), np.random.get_state(), torch.get_rng_state(), tuple(cuda))

    def restore(self, only: torch.device | None = None) -> None:
        """They continue from here."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.host)
        for number, state in enumerate(self.devices):
            torch.cuda.set_rng_state(state, number if only is None else only)

    def is_same(self, other: RandomState) -> bool:
        """Whether the same numbers follow."""
        mine, others = (self.host, *self.devices), (other.host, *other.devices)
        return (
            self.python == other.python
            and all(np.array_equal(one, two) for one, two in zip(self.numpy, other.numpy, strict=True))
            and len(mine) == len(others)
            and all(map(torch.equal, mine, others))
        )


@contextmanager
def preserved_rng() -> Iterator[None]:
    """Generators continue as if nothing had been drawn inside."""
    state = RandomState.now()
    try:
        yield
    finally:
        state.restore()
