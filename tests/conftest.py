"""What every test starts from: one thread, fixed seeds, and a pool of processes for those that need several."""

import gc
import os
import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, settings

from tests.pool import modes, pool  # noqa: F401  a fixture

# No test reads or writes what searches keep in the user's cache directory, in this process or in those that it starts.
os.environ["XDG_CACHE_HOME"] = os.devnull

# A busy machine makes any example slow; a slow example is no fault.
settings.register_profile("house", deadline=None, suppress_health_check=[HealthCheck.too_slow])  # machines are loaded
settings.load_profile("house")


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    # Several processes share two cores; more threads would only make them wait for one another.
    torch.set_num_threads(1)
    gc.freeze()  # what was imported is not looked through again whenever a simulation or a search collects garbage


@pytest.fixture(scope="module", autouse=True)
def _no_group_stays() -> Iterator[None]:
    """A mesh of one process stands on a group of one; simulations want none."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(autouse=True)
def _seeds() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _same_modes() -> Iterator[None]:
    """A test that leaves autocast on, say, makes others fail that have nothing to do with it."""
    before = modes()
    yield
    assert modes() == before


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
