"""Models whose parameters have no memory until the first step, and the one context that scripts make models in.

A parameter that a module registers goes to the meta device; what a constructor has put into it is let go of. Its
value is the one that `model.apply` of the modules' own initialization draws (`runtime.initial_values`), once it is
known which process holds it. Buffers keep what they were made with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from atorch.errors import ArgumentError, check_bools, shown
from atorch.model.deferred_init import InitialValues, give_values
from atorch.model.meta_device import give_memory, has_meta, is_meta, like, unfilled
from atorch.smp.session import is_initialized, session
from atorch.smp.tensor.marks import tensor_parallelism as marking

ADVICE = (
    "Make that module outside of smp.delay_param_initialization(), or give its class a reset_parameters that writes "
    "its parameters"
)

_delaying: ContextVar[bool] = ContextVar("atorch_smp_delaying", default=False)


@contextmanager
def delay_param_initialization(enabled: bool = True) -> Iterator[None]:
    """A context whose modules, those that are made inside, have parameters without memory until the first step.

    A parameter that is put in the place of one which its module has already, as loading does, keeps its value; so does
    what is tied to such. Nested contexts: the innermost wins, and with `enabled` False parameters are made as ever.

    Raises:
        ArgumentError: `enabled` is no bool.
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
    known: Any = WeakIdKeyDictionary()  # one that several modules register stays one

    def delayed(module: nn.Module, name: str, parameter: Any) -> nn.Parameter | None:
        is_new = module._parameters.get(name) is None
        if not _delaying.get() or parameter is None or is_lazy(parameter) or is_meta(parameter) or not is_new:
            return None
        if parameter not in known:
            known[parameter] = like(parameter, torch.empty_like(parameter, device="meta"))
        return known[parameter]  # type: ignore[no-any-return]

    return delayed


@contextmanager
def model_creation(
    tensor_parallelism: bool = False, dtype: torch.dtype | None = None, **tensor_parallel_config: Any
) -> Iterator[None]:
    """The context to make a model in: with its dtype, marked for tensor parallelism, delayed where the session says so.

    Args:
        tensor_parallelism: mark modules that are made inside, as `smp.tensor_parallelism` does.
        dtype: of floating-point parameters that are made inside; None for torch's default.
        tensor_parallel_config: for `smp.tensor_parallelism`; not read without it.

    `delayed_parameter_initialization` in `smp.init`'s configuration delays parameters' values.

    Raises:
        ArgumentError: a dtype that no parameter can be trained in, or what `smp.tensor_parallelism` refuses.
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


def delayed_values(model: nn.Module, init: Callable[[nn.Module], Any] | None = None) -> InitialValues | None:
    """Values of the parameters that were delayed; None where none was. Ask while the model is whole.

    init: writes a module's own parameters; None for the model's `_init_weights`, as models of transformers have it, or
        else the modules' own `reset_parameters`.

    Raises:
        ArgumentError: nothing writes to some of them.
    """
    if not has_meta([model]):
        return None
    own = getattr(model, "_init_weights", None)
    return InitialValues(model, init or (own if callable(own) else None), ADVICE)


def fill(parts: Iterable[nn.Module], device: torch.device, values: InitialValues | None) -> dict[Tensor, Tensor]:
    """Give what has become of a model here the values of `delayed_values`; returns parameters by those before.

    One parameter is whole at a time, and those of other processes are let go of at once. All processes call this
    together; the numbers are those that rank 0 would draw for the whole model.
    """
    held = list(parts)
    if values is None:
        return {}
    made = give_memory(held, lambda each: unfilled(each, device))
    give_values(values, held, device)
    return made
