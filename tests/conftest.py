"""What every test shares."""

from __future__ import annotations

import pytest
import torch

from tests.pool import pool

__all__ = ["pool"]


@pytest.fixture(autouse=True)
def _one_thread_and_a_seed() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
