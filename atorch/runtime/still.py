"""A model that is looked at and left as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from atorch.runtime.wrapper import Wrapper


@contextmanager
def still(model: nn.Module) -> Iterator[None]:
    """Everything below the model's root in eval mode. The root stays: some return their losses in training only."""
    root = model.module if isinstance(model, (Wrapper, DistributedDataParallel)) else model
    training = [module for module in root.modules() if module is not root and module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Buffers and random numbers are afterwards what they were."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers()) if tensor.device.type != "cpu"}
    kind = next(iter(devices)).type if devices else "cuda"
    try:
        with torch.random.fork_rng([device.index for device in devices], device_type=kind):
            yield
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
