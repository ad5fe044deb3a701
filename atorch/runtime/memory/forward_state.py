"""Values of a forward that its recompute needs: state as it was before, and results that are kept.

    state = ForwardState(modules, leaves, draws=True)    # before forward
    ...                                                  # forward
    state.settle()                                       # keeps only state that forward changed
    with state.as_before():                              # the recompute; afterwards the current state is restored
        ...

The state has buffers and other attributes of modules (counters, tensors, lists that blocks append to), changed in place
or replaced. It has the generators of Python and numpy, and those that a module holds or that are among the arguments.
Torch's own generators are left to `torch.utils.checkpoint`. State reached otherwise (globals, closures) is not covered.

Selective recomputation keeps results of products with weights and of attention, which do nearly all of a block's work.
Norms, activations and dropout take much of its memory. So little is computed twice (Korthikanti et al. 2022, arXiv
2205.05198, section 5; unlike there, attention is kept, since fused attention saves no scores). It uses torch's
selective checkpointing. Products of activations with one another (`bmm`, in eager attention) are recomputed, since
their results grow with the square of the sequence. So is attention with dropout. With a kept result it would draw no
random numbers in the recompute, and the block's later ones would differ from forward's.
"""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from atorch.distributed.rng import RandomState

COUNTER = "_checkpoint_fwd_counter"  # FairScale's name; a recompute is meant to change it
SMALL_BYTES = 1 << 18
"""Accelerator buffers up to this size are kept without comparison, for which the host would wait for the device."""

_NO_DATA: Set[str] = frozenset(vars(nn.Module())) | {COUNTER}
_HOST = torch.device("cpu")
_GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
_CONTAINERS = (list, dict, set, deque)


class ForwardState:
    """The state of modules, and of generators if forward `draws`, before a forward. leaves: of its arguments."""

    def __init__(self, modules: Iterable[nn.Module], leaves: Iterable[Any], draws: bool) -> None:
        places = [place for module in modules for place in (vars(module), module._buffers) if isinstance(place, dict)]
        self._places = [(place, _attributes(place)) for place in places]
        values = {id(value): value for _, data in self._places for value in data.values()}
        values.update((id(leaf), leaf) for leaf in leaves if isinstance(leaf, _GENERATORS))
        self._contents = [_Content(value) for value in values.values() if _has_content(value, draws)]
        self._drawn = RandomState.now(_HOST) if draws else None

    def settle(self) -> None:
        """Keep only state that has changed since."""
        self._places = [(place, data) for place, data in self._places if not _is_same(_attributes(place), data)]
        self._contents = [content for content in self._contents if content.is_changed()]
        if self._drawn is not None and self._drawn.is_same(RandomState.now(_HOST)):
            self._drawn = None

    @contextmanager
    def as_before(self) -> Iterator[None]:
        """Inside, the state is as before forward. Afterwards the current state is restored."""
        places = [(place, _attributes(place)) for place, _ in self._places]
        contents = [(content.value, _snapshot(content.value)) for content in self._contents]
        drawn = None if self._drawn is None else RandomState.now(_HOST)
        try:
            for place, data in self._places:
                _refill(place, data)
            for content in self._contents:
                _restore(content.value, content.kept.clone() if isinstance(content.value, Tensor) else content.kept)
            if self._drawn is not None:
                self._drawn.restore()
            yield
        finally:
            for place, data in places:
                _refill(place, data)
            for value, snapshot in contents:
                _restore(value, snapshot)
            if drawn is not None:
                drawn.restore()


class _Content:
    """The saved contents of a value that can change in place."""

    def __init__(self, value: Any) -> None:
        self.value, self.kept = value, _snapshot(value)
        if isinstance(value, Tensor):
            self._version, self._pointer, self.kept = value._version, value.data_ptr(), self.kept.clone()

    def is_changed(self) -> bool:
        value, kept = self.value, self.kept
        if isinstance(value, _CONTAINERS):
            return not _is_same(value, kept)
        if not isinstance(value, Tensor) or (value._version, value.data_ptr()) != (self._version, self._pointer):
            return True
        # Normalization kernels, and writes to `.data`, do not raise the version.
        return (not value.is_cpu and value.nbytes <= SMALL_BYTES) or not torch.equal(value, kept)


def _attributes(place: Mapping[str, Any]) -> dict[str, Any]:
    names = place.keys() - _NO_DATA  # runs in C, since a block is called often
    return dict(place) if len(names) == len(place) else {name: place[name] for name in names}


def _has_content(value: Any, draws: bool) -> bool:
    if isinstance(value, Tensor):  # fakes and subclasses change only by replacement
        is_plain = type(value) is Tensor and value.layout == torch.strided and not value.is_meta
        return is_plain and not (value.requires_grad or value.is_inference())
    return type(value) in _CONTAINERS or (draws and isinstance(value, _GENERATORS))


def _snapshot(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.data
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    return copy.copy(value) if isinstance(value, _CONTAINERS) else value.get_state()


def _restore(value: Any, snapshot: Any) -> None:
    if isinstance(value, Tensor):
        value.data = snapshot
    elif isinstance(value, random.Random):
        value.setstate(snapshot)
    elif isinstance(value, np.random.Generator):
        value.bit_generator.state = snapshot
    elif isinstance(value, _CONTAINERS):
        value.clear()
        value.update(snapshot) if isinstance(value, (dict, set)) else value.extend(snapshot)
    else:
        value.set_state(snapshot)


def _refill(place: dict[str, Any], data: Mapping[str, Any]) -> None:
    for name in [name for name in _attributes(place) if name not in data]:
        del place[name]
    place.update(data)


def _is_same(one: Any, other: Any) -> bool:
    """True if two containers hold the same objects."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(value is other[name] for name, value in one.items())
    ids = [*map(id, one)], [*map(id, other)]
    return set(ids[0]) == set(ids[1]) if isinstance(one, set) else ids[0] == ids[1]


_aten = torch.ops.aten
_PRODUCTS: Set[Any] = {
    op.default for op in (_aten.mm, _aten.addmm, _aten.convolution, _aten._scaled_mm, _aten._grouped_mm)
}
_ATTENTION: Set[Any] = {
    op.default
    for op in (
        _aten._scaled_dot_product_flash_attention, _aten._scaled_dot_product_flash_attention_for_cpu,
        _aten._scaled_dot_product_efficient_attention, _aten._scaled_dot_product_cudnn_attention,
        _aten._scaled_dot_product_fused_attention_overrideable, _aten._flash_attention_forward,
        _aten._efficient_attention_forward,
    )
}  # fmt: skip


def selective_contexts() -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """The modes of forward and its recompute: the first keeps results, the second returns them."""
    contexts: tuple[TorchDispatchMode, TorchDispatchMode] = create_selective_checkpoint_contexts(policy)
    return contexts


def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep an operation's result, or recompute it."""
    if op in _PRODUCTS or (op in _ATTENTION and not _draws(op, args, kwargs)):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def _draws(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """True if attention draws random numbers, for dropout."""
    names = (argument.name for argument in op._schema.arguments)
    arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    return bool(arguments.get("dropout_p", 0.0))
