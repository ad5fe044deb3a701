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
    def now(cls) -> RandomState:
        """Of this moment."""
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else ()
        return cls(random.getstate(), np.random.get_state(), torch.get_rng_state(), tuple(cuda))

    def restore(self) -> None:
        """They continue from here."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.host)
        for device, state in enumerate(self.devices):
            torch.cuda.set_rng_state(state, device)


@contextmanager
def preserved_rng() -> Iterator[None]:
    """Generators continue as if nothing had been drawn inside."""
    state = RandomState.now()
    try:
        yield
    finally:
        state.restore()
