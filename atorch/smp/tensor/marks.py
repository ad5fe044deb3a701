"""Marks of modules for tensor parallelism: `smp.tensor_parallelism` and `smp.set_tensor_parallelism`.

A mark lies on the module and goes with its copies. Modules that are created inside `smp.tensor_parallelism` are seen
by torch's own hook for the registration of parameters, and those whose class is registered by their constructor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from atorch.errors import ArgumentError, check_bools, shown
from atorch.logs import logger

M = TypeVar("M", bound=nn.Module)

ATTRIBUTE = "_smp_tensor_parallelism"
"""The attribute of a module's mark."""


@dataclass(frozen=True)
class TensorMark:
    """A mark of a module: to be split or not, and the arguments for what replaces it."""

    enabled: bool = True
    config: Mapping[str, Any] = field(default_factory=dict)


_inside: ContextVar[TensorMark | None] = ContextVar("smp_tensor_parallelism", default=None)


@contextmanager
def tensor_parallelism(enabled: bool = True, **config: Any) -> Iterator[None]:
    """A context whose modules, those that are created inside, are marked for tensor parallelism, or against it.

    Of nested contexts the innermost wins.

    Args:
        config: arguments for the distributed modules that replace registered ones made inside, over those that the
            registered `init_hook` gives. `fused_softmax` and `fused_bias_gelu` change nothing: torch's kernels are
            fused.

    Raises:
        ArgumentError: `enabled` is no bool.
    """
    token = _inside.set(_mark(enabled, config))
    try:
        with register_module_parameter_registration_hook(_note_created):
            yield
    finally:
        _inside.reset(token)


def set_tensor_parallelism(module: nn.Module, enabled: bool = True, **config: Any) -> None:
    """Mark a module that exists, and all below it, for tensor parallelism, or against it. Call it before
    `smp.DistributedModel`; what was marked before is marked anew.

    config: as for `tensor_parallelism`.

    Raises:
        ArgumentError: `module` is no module, or `enabled` no bool.
    """
    if not isinstance(module, nn.Module):
        raise ArgumentError(
            f"set_tensor_parallelism was given {shown(module)}; give a module of the model, before it is wrapped"
        )
    mark = _mark(enabled, config)
    if enabled and all(parameter.dim() < 2 for parameter in module.parameters()):
        logger.warning(
            "set_tensor_parallelism was given a %s, in which there is no matrix to split; mark linear layers, "
            "embeddings, or modules that hold some", type(module).__name__,
        )  # fmt: skip
    for each in module.modules():
        put_mark(each, mark)


def current_mark() -> TensorMark | None:
    """The mark of the innermost `tensor_parallelism` here; None outside of all."""
    return _inside.get()


def put_mark(module: nn.Module, mark: TensorMark) -> None:
    vars(module)[ATTRIBUTE] = mark


def mark_of(module: nn.Module) -> TensorMark | None:
    """A module's own mark; None if it has none."""
    mark: TensorMark | None = vars(module).get(ATTRIBUTE)
    return mark


def tensor_marks(model: nn.Module) -> dict[str, TensorMark]:
    """The marks of a model's modules, by the modules' names."""
    found = {name: mark_of(module) for name, module in model.named_modules()}
    return {name: mark for name, mark in found.items() if mark is not None}


def marked_parameters(model: nn.Module, is_distributed: Callable[[nn.Module], bool]) -> frozenset[str]:
    """All names of the parameters of modules that are marked, or stand below a distributed module, and are not
    marked against it.

    is_distributed: whether a module is one whose purpose is to be split.
    """
    found: set[str] = set()

    def visit(module: nn.Module, path: str, is_below: bool) -> None:
        mark, is_below = mark_of(module), is_below or is_distributed(module)
        if is_below if mark is None else mark.enabled:
            found.update(f"{path}{name}" for name, parameter in module._parameters.items() if parameter is not None)
        for name, child in module._modules.items():
            if child is not None:
                visit(child, f"{path}{name}.", is_below)

    visit(model, "", False)
    return frozenset(found)


def _note_created(module: nn.Module, name: str, parameter: Any) -> None:
    mark, has_some = _inside.get(), any(each is not None for each in module._parameters.values())
    if mark is not None and mark_of(module) is None and not has_some:  # its first: the module is being made
        put_mark(module, mark)


def _mark(enabled: bool, config: Mapping[str, Any]) -> TensorMark:
    check_bools("tensor_parallelism", enabled=enabled)
    return TensorMark(bool(enabled), dict(config))
