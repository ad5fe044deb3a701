"""A model that is looked at and left as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from atorch.distributed.dense_parts import same_values
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
                if not same_values(buffer, before):  # writing what is there would count as a change for backward
                    buffer.copy_(before)


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """The model in eval mode; afterwards each module is in the mode it was in."""
    modes = {module: module.training for module in (model, *model.modules())}  # a wrapper is none of its modules
    model.eval()
    try:
        yield
    finally:
        model.train(modes[model])  # an engine behind it hears of that
        for module, mode in modes.items():
            module.training = mode


@contextmanager
def put_back(model: nn.Module, device: torch.device) -> Iterator[None]:
    """The model on `device`, without gradients; afterwards its values, buffers, gradients and attributes are back."""
    attributes = [(vars(module), dict(vars(module))) for module in model.modules()]
    holders = [held for module in model.modules() for held in (module._parameters, module._buffers)]
    members = [(held, dict(held)) for held in holders if isinstance(held, dict)]  # a scripted module's are fixed
    parameters = [(each, each.data, each.grad) for each in model.parameters()]
    buffers = [(each, each.data) for each in model.buffers()]
    for parameter, values, _ in parameters:
        parameter.grad = None
        if values.device != device:
            parameter.data = values.to(device)
    for buffer, values in buffers:
        buffer.data = values.to(device, copy=True)
    try:
        yield
    finally:
        for held, before in (*attributes, *members):
            held.clear()
            held.update(before)
        for parameter, values, grad in parameters:
            parameter.grad = None
            parameter.data, parameter.grad = values, grad
        for buffer, values in buffers:
            buffer.data = values
