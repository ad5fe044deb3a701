"""Tensor parallelism of `smp`: the marks that `smp.tensor_parallelism` and `smp.set_tensor_parallelism` put on modules.

A mark is an attribute of the module and is copied with it. Modules that are created inside `smp.tensor_parallelism` are
marked by torch's parameter registration hook, and those of a registered class by their constructor. At the first step
`replacement` replaces marked modules of registered classes, and `split` splits the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from atorch.errors import ArgumentError, check_bools, shown
from atorch.logs import logger
from atorch.smp.nn.layers import DistributedModule

M = TypeVar("M", bound=nn.Module)

ATTRIBUTE = "_smp_tensor_parallelism"
"""The module attribute with its mark."""


@dataclass(frozen=True)
class TensorMark:
    """A module's mark: whether to split it, and the arguments for its replacement."""

    enabled: bool = True
    config: Mapping[str, Any] = field(default_factory=dict)


_inside: ContextVar[TensorMark | None] = ContextVar("smp_tensor_parallelism", default=None)


@contextmanager
def tensor_parallelism(enabled: bool = True, **config: Any) -> Iterator[None]:
    """A context that marks modules created inside for tensor parallelism, or against it.

    The innermost of nested contexts wins.

    Args:
        config: arguments for the distributed modules that replace registered ones created inside; they override those
            of the registered `init_hook`. `fused_softmax` and `fused_bias_gelu` have no effect: torch's kernels are
            fused.

    Raises:
        ArgumentError: `enabled` is not a bool.
    """
    token = _inside.set(_mark(enabled, config))
    try:
        with register_module_parameter_registration_hook(_note_created):
            yield
    finally:
        _inside.reset(token)


def set_tensor_parallelism(module: nn.Module, enabled: bool = True, **config: Any) -> None:
    """Mark an existing module and its submodules for tensor parallelism, or against it, and replace earlier marks.

    Call it before `smp.DistributedModel`. config: as for `tensor_parallelism`.

    Raises:
        ArgumentError: `module` is not a module, or `enabled` not a bool.
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
    for inner in module.modules():
        put_mark(inner, mark)


def current_mark() -> TensorMark | None:
    """The mark of the innermost active `tensor_parallelism`; None outside all."""
    return _inside.get()


def put_mark(module: nn.Module, mark: TensorMark) -> None:
    vars(module)[ATTRIBUTE] = mark


def mark_of(module: nn.Module) -> TensorMark | None:
    """A module's own mark; None if it has none."""
    mark: TensorMark | None = vars(module).get(ATTRIBUTE)
    return mark


def tensor_marks(model: nn.Module) -> dict[str, TensorMark]:
    """The marks of a model's modules, by the modules' names."""
    marks = {name: mark_of(module) for name, module in model.named_modules()}
    return {name: mark for name, mark in marks.items() if mark is not None}


def marked_parameters(model: nn.Module) -> frozenset[str]:
    """All parameter names of modules that are marked, or inside a distributed module and not marked against it."""
    names: set[str] = set()

    def visit(module: nn.Module, path: str, is_below: bool) -> None:
        mark, is_below = mark_of(module), is_below or isinstance(module, DistributedModule)
        if is_below if mark is None else mark.enabled:
            names.update(f"{path}{name}" for name, parameter in module._parameters.items() if parameter is not None)
        for name, child in module._modules.items():
            if child is not None:
                visit(child, f"{path}{name}.", is_below)

    visit(model, "", False)
    return frozenset(names)


def _note_created(module: nn.Module, name: str, parameter: Any) -> None:
    mark, has_some = _inside.get(), any(present is not None for present in module._parameters.values())
    if mark is not None and mark_of(module) is None and not has_some:  # its first parameter: it is being created
        put_mark(module, mark)


def _mark(enabled: bool, config: Mapping[str, Any]) -> TensorMark:
    check_bools("tensor_parallelism", enabled=enabled)
    return TensorMark(bool(enabled), dict(config))
