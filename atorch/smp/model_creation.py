"""Models whose parameters have no memory until the first step, and the context in which scripts create models.

A parameter that a module registers goes to the meta device, and the constructor's values are dropped. After
partitioning the modules' own initialization draws its value (`model.deferred_init`) on the process that holds it.
Buffers keep their values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from atorch.errors import ArgumentError, check_bools, shown
from atorch.model.deferred_init import InitialValues, give_values
from atorch.model.meta_device import give_memory, has_meta, is_meta, like, unfilled
from atorch.runtime.optimizer.held_tensors import write_part
from atorch.smp.session import is_initialized, session
from atorch.smp.tensor import tensor_parallelism as marking

ADVICE = (
    "Make that module outside of smp.delay_param_initialization(), or give its class a reset_parameters that writes "
    "its parameters"
)

_delaying: ContextVar[bool] = ContextVar("atorch_smp_delaying", default=False)


@contextmanager
def delay_param_initialization(enabled: bool = True) -> Iterator[None]:
    """A context in which modules are created with parameters that have no memory until the first step.

    A parameter that replaces an existing one of its module, as loading does, keeps its value; so does a parameter tied
    to it. The innermost of nested contexts wins; `enabled` False creates ordinary parameters.

    Raises:
        ArgumentError: `enabled` is not a bool.
    """
    check_bools("delay_param_initialization", enabled=enabled)
    token = _delaying.set(enabled)
    delayer: Callable[..., Any] = _delayer()  # torch's annotation lets a hook return nothing
    try:
        with register_module_parameter_registration_hook(delayer):
            yield
    finally:
        _delaying.reset(token)


def _delayer() -> Callable[[nn.Module, str, Any], nn.Parameter | None]:
    replaced: Any = WeakIdKeyDictionary()  # keeps tied parameters tied

    def delayed(module: nn.Module, name: str, parameter: Any) -> nn.Parameter | None:
        is_new = module._parameters.get(name) is None
        if not _delaying.get() or parameter is None or is_lazy(parameter) or is_meta(parameter) or not is_new:
            return None
        if parameter not in replaced:
            replaced[parameter] = like(parameter, torch.empty_like(parameter, device="meta"))
        return replaced[parameter]  # type: ignore[no-any-return]

    return delayed


@contextmanager
def model_creation(
    tensor_parallelism: bool = False, dtype: torch.dtype | None = None, **tensor_parallel_config: Any
) -> Iterator[None]:
    """The context to create a model in: sets the dtype, marks for tensor parallelism, and delays initialization.

    Args:
        tensor_parallelism: mark modules that are created inside, as `smp.tensor_parallelism` does.
        dtype: dtype of floating-point parameters that are created inside; None for torch's default.
        tensor_parallel_config: for `smp.tensor_parallelism`; ignored without it.

    It delays initialization if `delayed_parameter_initialization` is set in `smp.init`'s configuration.

    Raises:
        ArgumentError: the dtype is not a floating-point one, or `smp.tensor_parallelism` refuses its arguments.
    """
    check_bools("model_creation", tensor_parallelism=tensor_parallelism)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ArgumentError(f"model_creation was given {shown(dtype)} as dtype; give a floating-point one of torch's")
    with ExitStack() as contexts:
        if dtype is not None:
            contexts.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(dtype)
        if is_initialized() and session().config.delayed_parameter_initialization:
            contexts.enter_context(delay_param_initialization())
        if tensor_parallelism:
            contexts.enter_context(marking(True, **tensor_parallel_config))
        yield


def delayed_values(model: nn.Module) -> InitialValues | None:
    """Initial values of the delayed parameters; None if there are none. Call it while the model is whole.

    The model's `_init_weights`, as in transformers, or else the modules' own `reset_parameters` draw them.

    Raises:
        ArgumentError: some of them would not be initialized.
    """
    if not has_meta([model]):
        return None
    init = getattr(model, "_init_weights", None)
    return InitialValues(model, init if callable(init) else None, ADVICE)


def fill(parts: Iterable[nn.Module], device: torch.device, values: InitialValues | None) -> None:
    """Materialize a model's local parts with the values of `delayed_values`.

    Only one parameter is whole at a time, and those of other processes are freed at once. All processes call this
    together. The values are those that rank 0 would draw for the whole model.
    """
    modules = list(parts)
    if values is not None:
        give_memory(modules, lambda tensor: unfilled(tensor, device))
        give_values(values, modules, device, lambda names, target, value: write_part(target, value))
