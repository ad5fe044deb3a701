"""Optimizer states in host memory: the optimizer steps copies of parameters there, on gradients that are brought down.

Every step: gradients down, the inner optimizer steps the copies, what it made of them up (ZeRO-Offload, Ren et al.
2021, arXiv 2101.06840, section 4). Adam's two states leave the device so, and with masters in fp32 inside three of the
four values of a parameter. Gradients stay where backward puts them until then: clipping, loss scaling and reductions
before the step do not know of it.

Bytes of host memory for a parameter: a copy, the optimizer's states, and a gradient while a step runs. Pinned, where
the device is another one than the host's. On a CPU both are one memory, and copies are copies all the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from atorch.errors import ArgumentError
from atorch.model.user_functions import MakeOptimizer
from atorch.runtime.memory.host_threads import host_threads, tell_threads
from atorch.runtime.optimizer.fused_step import fuse
from atorch.runtime.optimizer.shadow_parameters import ShadowOptimizer, unrounded
from atorch.runtime.optimizer.wrapped_optimizer import WrappedOptimizer, local


def within(share: float, sizes: Sequence[int], taken: int = 0) -> list[bool]:
    """Flags of the items taken, each whole, in order, where it still fits: together at most `share` of all sizes.

    taken: what of that is taken already, by others than these.
    """
    room = share * (sum(sizes) + taken) * (1 + 1e-9) - taken
    chosen = []
    for size in sizes:
        chosen.append(0 < size <= room)
        room -= size if chosen[-1] else 0
    return chosen


class HostOptimizer(ShadowOptimizer):
    """An optimizer that keeps its states, and steps, in host memory for a share of the parameters.

    Args:
        make_inner: makes the inner optimizer, whose parameters are then on the host.
        groups: parameters, named parameters or groups of either.
        share: of the elements that train, at most so many; whole parameters, in the order of the groups, each that
            still fits.
        away: parameters that are on the host themselves, and count.
        values: of parameters that were rounded, what they had been; passed on to the copies.
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
        listed = [materialized(entry) for entry in groups]
        self.share, self._away = share, away
        self._chosen = set(_choose(_parameters(listed), share, away))
        self._values: MutableMapping[Tensor, Tensor] = {} if values is None else values
        super().__init__(make_inner, listed)
        self._device = next((local(each).device for each in self.stand_ins), torch.device("cpu"))
        if self._device.type != "cpu":
            with self._stand_ins_shown():
                fuse(self.inner)  # by hand, too: a CPU's default is one parameter after another, in six times the time
        tell_threads(self._device)

    def step(self, closure: Any = None) -> Any:
        """Bring gradients down, step there, and bring parameters up.

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
        for parameter, copy in self.stand_ins.items():
            if parameter.grad is not None:
                copy.grad = _down(parameter.grad, like=copy)
                stepped.append((parameter, copy))
        _wait(self.stand_ins)
        with self._stand_ins_shown(), host_threads(self._device):
            result = self.inner.step()
        self._bring_up(stepped)
        for _, copy in stepped:
            copy.grad = None
        return result

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Give the inner optimizer one more group, of whose parameters as large a share is stepped on the host."""
        if not any(param_group is known for known in self.inner.param_groups):
            param_group = materialized(param_group)
            self._chosen.update(_choose(_parameters([param_group]), self.share, self._away))
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, also one of an optimizer that keeps it on a device; and parameters, where it holds masters."""
        self._follow_changes()
        _wait(self.stand_ins)  # what was brought up last
        before = {copy: local(copy)._version for copy in self.stand_ins.values()}
        with self._stand_ins_shown():
            self.inner.load_state_dict(state_dict)
        self._bring_up([pair for pair in self.stand_ins.items() if local(pair[1])._version != before[pair[1]]])
        self._share()

    def _make_stand_in(self, parameter: Tensor) -> Tensor | None:
        if parameter not in self._chosen:
            return None
        copy = nn.Parameter(_down(parameter.detach()), requires_grad=parameter.requires_grad)
        _wait([parameter])  # masters inside start from what has arrived
        if (value := unrounded(self._values, parameter)) is not None:
            self._values[copy] = value
        return copy

    @torch.no_grad()
    def _follow_changes(self) -> None:
        """Let copies take the values of parameters that were written since the last step."""
        for parameter, copy in self._changed():
            local(copy).copy_(local(parameter))

    @torch.no_grad()
    def _bring_up(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        for parameter, copy in pairs:
            local(parameter).copy_(local(copy), non_blocking=True)
        self._note_values()


def host_bytes(groups: Sequence[Any], share: float, away: Collection[Tensor], state_bytes: float) -> float:
    """Bytes of host memory that a HostOptimizer of these groups takes, gradients of a step included."""
    chosen = _choose(_parameters(groups), share, away)
    masters = {2: 4}  # of 16 bits
    return sum(
        local(each).numel() * (2 * each.itemsize + masters.get(each.itemsize, 0) + state_bytes) for each in chosen
    )


def on_host(optimizer: Optimizer) -> Iterator[Tensor]:
    """Tensors of an optimizer, or those inside of it, in host memory by this: copies, masters, and states of both."""
    inside = [optimizer]
    while isinstance(inside[-1], WrappedOptimizer):
        inside.append(inside[-1].inner)
    here: dict[Tensor, None] = {}
    for each in inside:
        if isinstance(each, HostOptimizer):
            here.update(dict.fromkeys(each.stand_ins.values()))
        elif isinstance(each, ShadowOptimizer):
            here.update((stand_in, None) for parameter, stand_in in each.stand_ins.items() if parameter in here)
    yield from here
    for tensor in here:
        yield from (value for value in inside[-1].state.get(tensor, {}).values() if isinstance(value, Tensor))


def materialized(entry: Any) -> Any:
    """A group with its parameters in a list, for more than one look at them; anything else as it is."""
    if not isinstance(entry, dict):
        return entry
    params = entry["params"]
    return {**entry, "params": [params] if isinstance(params, Tensor) else list(params)}


def _parameters(groups: Iterable[Any]) -> Iterator[Tensor]:
    for entry in groups:
        if isinstance(entry, dict):
            yield from _parameters(entry["params"])
        else:
            yield entry[1] if isinstance(entry, tuple) else entry


def _choose(parameters: Iterable[Tensor], share: float, away: Collection[Tensor]) -> Iterator[Tensor]:
    absent = set(away)
    trained = [each for each in dict.fromkeys(parameters) if each.requires_grad]
    here = [each for each in trained if each not in absent]
    sizes = [local(each).numel() for each in here]
    taken = sum(local(each).numel() for each in trained if each in absent)
    return (each for each, is_chosen in zip(here, within(share, sizes, taken), strict=True) if is_chosen)


@torch.no_grad()
def _down(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """A copy in host memory, as the tensor is or `like` one that is there; it may still be on its way."""
    if tensor.is_sparse:
        return tensor.coalesce().to("cpu", copy=True)
    is_plain, is_apart = local(tensor) is tensor, tensor.device.type != "cpu"
    if like is None and not is_plain:
        return tensor.to("cpu", copy=True)
    template = tensor if like is None else like
    kept = torch.empty_like(template, device="cpu", pin_memory=is_apart and is_plain)
    local(kept).copy_(local(tensor), non_blocking=is_apart)
    return kept


def _wait(parameters: Iterable[Tensor]) -> None:
    """Wait until all copies that are queued, from and to the devices of these parameters, are made."""
    for device in {local(each).device for each in parameters}:
        if device.type != "cpu":
            torch.get_device_module(device.type).current_stream(device).synchronize()
