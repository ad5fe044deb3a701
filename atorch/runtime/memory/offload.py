"""Optimizer states in host memory: the optimizer steps copies of parameters there, on gradients copied from the device.

A step copies gradients to the host, runs the inner optimizer there, and copies the results back
(ZeRO-Offload, Ren et al. 2021, arXiv 2101.06840, section 4). So Adam's two states leave the device, and with fp32
masters inside three of the four values of a parameter. Until the step, gradients stay where backward puts them, so
clipping, loss scaling and reductions work as usual.

Host memory per parameter: a copy, the optimizer's states, and a gradient during a step. It is pinned, unless the device
is the CPU. On a CPU the copies are separate memory, too.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from atorch.distributed.world import local_world_size
from atorch.errors import ArgumentError
from atorch.logs import log_once
from atorch.model.user_functions import MakeOptimizer
from atorch.runtime.optimizer.shadow_parameters import ShadowOptimizer, fp32_value_of
from atorch.runtime.optimizer.user_optimizer import as_groups, materialized, tensor_of
from atorch.runtime.optimizer.wrapped_optimizer import fuse, layers_of, local


@contextmanager
def host_threads(device: torch.device) -> Iterator[None]:
    """Inside, the host uses this process's share of the cores for `device`, if torch has only one thread.

    torchrun sets OMP_NUM_THREADS to 1 unless it is set already. Steps of a CPU device keep their number of threads.
    """
    before = torch.get_num_threads()
    if device.type == "cpu" or before > 1:
        yield
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = max(1, cores // local_world_size())
    if threads > 1:
        log_once(
            f"the host steps with {threads} threads, its share of the cores; OMP_NUM_THREADS=1, as torchrun sets it, "
            "would leave one, and any other number is kept"
        )
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def within(share: float, sizes: Sequence[int], taken: int = 0) -> list[bool]:
    """Flags of the items taken: in order, each entire item that still fits into `share` of all sizes.

    taken: size of further items, which count among all sizes and are taken already.
    """
    room = share * (sum(sizes) + taken) * (1 + 1e-9) - taken
    chosen = []
    for size in sizes:
        chosen.append(0 < size <= room)
        room -= size if chosen[-1] else 0
    return chosen


class HostOptimizer(ShadowOptimizer):
    """An optimizer that steps a share of the parameters in host memory, and keeps their states there.

    Args:
        make_inner: makes the inner optimizer, from copies of parameters on the host.
        groups: parameters, named parameters or groups of either.
        share: largest share of the trainable elements, in full parameters, chosen in the order of the groups.
        away: parameters that are on the host already, and count in the share.
        values: of rounded parameters, the values before rounding, which are passed on to the copies.
    """

    def __init__(
        self,
        make_inner: MakeOptimizer,
        groups: Iterable[Any],
        share: float = 1.0,
        *,
        away: Collection[Tensor] = (),
        values: MutableMapping[Tensor, Tensor] | None = None,
    ) -> None:
        param_groups = materialized(groups)
        self.share, self._away = share, away
        self._chosen = set(_choose(param_groups, share, away))
        self._values: MutableMapping[Tensor, Tensor] = {} if values is None else values
        super().__init__(make_inner, param_groups)
        self._device = next((local(parameter).device for parameter in self.shadows), torch.device("cpu"))
        if self._device.type != "cpu":
            with self._with_shadows():
                fuse(self.inner)  # a CPU's default steps one parameter after another, in six times the time

    def step(self, closure: Any = None) -> Any:
        """Copy gradients to the host, step there, and copy parameters back.

        Raises:
            ArgumentError: a closure was given.
        """
        if closure is not None:
            raise ArgumentError(
                "HostOptimizer.step was given a closure, which would compute gradients of parameters that the "
                "optimizer has not brought up yet; take an optimizer that needs none, or leave out offload's optimizer"
            )
        self._follow_changes()
        stepped = []
        for parameter, copy in self.shadows.items():
            if parameter.grad is not None:
                copy.grad = _copy_to_host(parameter.grad, like=copy)
                stepped.append((parameter, copy))
        _wait(self.shadows)
        with self._with_shadows(), host_threads(self._device):
            result = self.inner.step()
        self._bring_up(stepped)
        for _, copy in stepped:
            copy.grad = None
        return result

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the inner optimizer, and step the same share of its parameters on the host."""
        if not any(param_group is group for group in self.inner.param_groups):
            (param_group,) = materialized([param_group])
            self._chosen.update(_choose([param_group], self.share, self._away))
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, also of an optimizer without offload; masters in it become the parameters' values."""
        self._follow_changes()
        _wait(self.shadows)  # for the last copies to the device
        before = {copy: local(copy)._version for copy in self.shadows.values()}
        super().load_state_dict(state_dict)
        self._bring_up([pair for pair in self.shadows.items() if local(pair[1])._version != before[pair[1]]])

    def _make_shadow(self, parameter: Tensor) -> Tensor | None:
        if parameter not in self._chosen:
            return None
        copy = nn.Parameter(_copy_to_host(parameter.detach()), requires_grad=parameter.requires_grad)
        _wait([parameter])  # masters inside start from the completed copy
        if (value := fp32_value_of(self._values, parameter)) is not None:
            self._values[copy] = value
        return copy

    @torch.no_grad()
    def _follow_changes(self) -> None:
        """Update copies of parameters that were written since the last step."""
        for parameter, copy in self._changed():
            local(copy).copy_(local(parameter))

    @torch.no_grad()
    def _bring_up(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        for parameter, copy in pairs:
            local(parameter).copy_(local(copy), non_blocking=True)
        self._note_values()


def host_bytes(groups: Sequence[Any], share: float, away: Collection[Tensor], state_bytes: float) -> float:
    """Bytes of host memory that a HostOptimizer of these groups takes, including gradients in a step."""
    chosen = _choose(groups, share, away)
    # 16-bit parameters have fp32 masters, too.
    return sum(local(p).numel() * (2 * p.itemsize + 4 * (p.itemsize == 2) + state_bytes) for p in chosen)


def on_host(optimizer: Optimizer) -> Iterator[Tensor]:
    """Tensors in host memory of HostOptimizers in an optimizer: copies, masters, and states of both."""
    layers = layers_of(optimizer)
    hosted: dict[Tensor, None] = {}
    for layer in layers:
        if isinstance(layer, HostOptimizer):
            hosted.update(dict.fromkeys(layer.shadows.values()))
        elif isinstance(layer, ShadowOptimizer):
            hosted.update((shadow, None) for parameter, shadow in layer.shadows.items() if parameter in hosted)
    yield from hosted
    for tensor in hosted:
        yield from (value for value in layers[-1].state.get(tensor, {}).values() if isinstance(value, Tensor))


def _choose(groups: Iterable[Any], share: float, away: Collection[Tensor]) -> Iterator[Tensor]:
    absent, parameters = set(away), [tensor_of(entry) for group in as_groups(groups) for entry in group["params"]]
    trained = [parameter for parameter in dict.fromkeys(parameters) if parameter.requires_grad]
    eligible = [parameter for parameter in trained if parameter not in absent]
    sizes = [local(parameter).numel() for parameter in eligible]
    taken = sum(local(parameter).numel() for parameter in trained if parameter in absent)
    return (parameter for parameter, fits in zip(eligible, within(share, sizes, taken), strict=True) if fits)


@torch.no_grad()
def _copy_to_host(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """Begin a copy to host memory, in the layout of the tensor or of `like`; `_wait` waits for it."""
    if tensor.is_sparse:
        return tensor.coalesce().to("cpu", copy=True)
    is_plain, is_on_device = local(tensor) is tensor, tensor.device.type != "cpu"
    if like is None and not is_plain:
        return tensor.to("cpu", copy=True)
    template = tensor if like is None else like
    copy = torch.empty_like(template, device="cpu", pin_memory=is_on_device and is_plain)
    local(copy).copy_(local(tensor), non_blocking=is_on_device)
    return copy


def _wait(parameters: Iterable[Tensor]) -> None:
    """Wait for all queued copies from and to the devices of these parameters."""
    for device in {local(parameter).device for parameter in parameters}:
        if device.type != "cpu":
            torch.get_device_module(device.type).current_stream(device).synchronize()
