"""What every test starts from: one thread, fixed seeds, and a pool of processes for those that need several."""

import random

import numpy as np
import pytest
import torch
from hypothesis import settings

from tests.pool import pool  # noqa: F401  a fixture

# A busy machine makes any example slow; a slow example is no fault.
settings.register_profile("house", deadline=None)
settings.load_profile("house")


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    # Several processes share two cores; more threads would only make them wait for one another.
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeds() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
