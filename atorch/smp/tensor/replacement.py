"""Replacement of marked modules of registered classes: `smp.tp_register`, `smp.tp_register_with_module`.

A registered class records the constructor arguments of its modules, for the `init_hook`. The registration is an
attribute of the class.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from atorch.errors import ArgumentError, near_miss, shown
from atorch.logs import logger
from atorch.model.module_swap import Swap, adopt_state, swap_modules
from atorch.model.wrapper import is_override, override
from atorch.smp.activation_checkpointing import OPTIONS
from atorch.smp.nn.layers import WITHOUT_EFFECT
from atorch.smp.tensor import TensorMark, current_mark, mark_of, put_mark, set_tensor_parallelism

C = TypeVar("C", bound=type[nn.Module])
Hook = Callable[..., Any]

_REGISTERED = "_smp_distributed"  # attribute of a class: its Registered
_MADE_WITH = "_smp_made_with"  # attribute of its modules: their constructor arguments


@dataclass(frozen=True)
class Registered:
    """The replacement of a class's modules, and the hooks that translate arguments, results and values."""

    dist_module: type[nn.Module]
    init_hook: Hook | None = None
    forward_hook: Hook | None = None
    return_hook: Hook | None = None
    state_hook: Hook | None = None


@dataclass(frozen=True)
class _Arguments:
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def __deepcopy__(self, memo: dict[int, Any]) -> _Arguments:
        return self  # configurations among the arguments may not be copyable


def tp_register(
    dist_module: type[nn.Module],
    init_hook: Hook | None = None,
    forward_hook: Hook | None = None,
    return_hook: Hook | None = None,
    state_hook: Hook | None = None,
) -> Callable[[C], C]:
    """A class decorator: marked modules of the class are replaced by modules of `dist_module`.

    Args:
        dist_module: an equivalent module that can be split, such as `smp.nn.DistributedTransformer`.
        init_hook: maps the constructor's arguments, without `self`, to (args, kwargs) of `dist_module`. None: the same.
        forward_hook: maps the forward's arguments to (args, kwargs) of `dist_module`'s forward. None: the same.
        return_hook: maps a result of `dist_module` to one of the class. None: the same.
        state_hook: maps the state dict of the replaced module to one of `dist_module`. None: values are copied if all
            names and shapes are equal; else the new module keeps its initial values, and a warning is logged.

    Raises:
        ArgumentError: `dist_module` is not a module class, or a hook is not callable.
    """

    def register(cls: C) -> C:
        tp_register_with_module(cls, dist_module, init_hook, forward_hook, return_hook, state_hook)
        return cls

    return register


def tp_register_with_module(
    module_cls: type[nn.Module], dist_module: type[nn.Module], init_hook: Hook | None = None,
    forward_hook: Hook | None = None, return_hook: Hook | None = None, state_hook: Hook | None = None,
) -> None:  # fmt: skip
    """Register an existing class, as `tp_register` does, before its modules are created.

    The other arguments are those of `tp_register`.

    Raises:
        ArgumentError: a class is not a module class, or a hook is not callable.
    """
    for name, cls in (("module_cls", module_cls), ("dist_module", dist_module)):
        if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
            raise ArgumentError(f"tp_register was given {name} {shown(cls)}; give a subclass of torch.nn.Module")
    hooks = {
        "init_hook": init_hook, "forward_hook": forward_hook, "return_hook": return_hook, "state_hook": state_hook,
    }  # fmt: skip
    for name, hook in hooks.items():
        if hook is not None and not callable(hook):
            raise ArgumentError(f"tp_register was given {name} {shown(hook)}; give a function or None")
    if _REGISTERED not in vars(module_cls):
        _note_arguments(module_cls)
    setattr(module_cls, _REGISTERED, Registered(dist_module, **hooks))


def replace_registered(model: nn.Module) -> nn.Module:
    """Replace the outermost marked modules of registered classes in place; returns the model.

    If `model` itself is one of them, its replacement is returned. Replacements are marked.

    Raises:
        ArgumentError: a module was created before its class was registered; a hook returned an invalid value; a tied
            parameter has no place in the new module; or no replacement takes a keyword of `tensor_parallelism`.
    """
    replacements: list[nn.Module] = []
    used: set[str] = set(WITHOUT_EFFECT)
    chosen = dict(_outermost(model))

    def replacement(name: str, module: nn.Module) -> nn.Module | None:
        if module not in chosen:
            return None
        replacements.append(_replacement(name or "the model", module, chosen[module], used))
        return replacements[-1]

    if model in chosen:
        replaced = replacement("", model)
        assert replaced is not None
        model = replaced
    else:
        swaps: list[Swap] = swap_modules(model, replacement)
        if swaps:
            logger.info("replaced for tensor parallelism: %s", "; ".join(map(str, swaps)))
    _check_keywords(model, used)
    for module in model.modules():
        vars(module).pop(_MADE_WITH, None)  # lets the arguments be freed
    return model


def _note_arguments(cls: type[nn.Module]) -> None:
    original = cls.__init__

    @functools.wraps(original)
    def noting(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if type(self) is cls:
            vars(self)[_MADE_WITH] = _Arguments(args, kwargs)
            mark = current_mark()
            if mark is not None:
                put_mark(self, mark)

    setattr(cls, "__init__", noting)  # noqa: B010  a class's constructor, as its user asked


def _outermost(module: nn.Module) -> Iterator[tuple[nn.Module, Registered]]:
    registered, mark = _registered(module), mark_of(module)
    if registered is not None and mark is not None and mark.enabled:
        yield module, registered
        return
    for child in module.children():
        yield from _outermost(child)


def _registered(module: nn.Module) -> Registered | None:
    """The registration of a module's own class, below subclasses that `override` added."""
    original: Any = next(cls for cls in type(module).__mro__ if not is_override(cls))
    registered: Registered | None = vars(original).get(_REGISTERED)
    return registered


def _replacement(name: str, module: nn.Module, registered: Registered, used: set[str]) -> nn.Module:
    made_with: _Arguments | None = vars(module).get(_MADE_WITH)
    if made_with is None:
        cls = type(module).__name__
        raise ArgumentError(
            f"{name} was made before its class {cls} was registered, so that its constructor's arguments are not "
            f"known; call smp.tp_register_with_module({cls}, …) before the model is made"
        )
    if any(OPTIONS in vars(inner) for inner in module.modules()):
        raise ArgumentError(
            f"{name} ({type(module).__name__}) is to be replaced by a {registered.dist_module.__name__}, and "
            "activation checkpointing was set in it; call smp.set_activation_checkpointing after smp.DistributedModel"
        )
    args, kwargs = made_with.args, dict(made_with.kwargs)
    if registered.init_hook is not None:
        args, kwargs = _pair(registered.init_hook(*args, **kwargs), "init_hook", type(module))
    mark = mark_of(module) or TensorMark()
    accepted = _parameters_of(registered.dist_module)
    config = {key: value for key, value in mark.config.items() if accepted is None or key in accepted}
    used.update(config)
    left = [] if accepted is None else sorted(kwargs.keys() - accepted)
    if left and registered.init_hook is not None:
        logger.info("%s takes no %s of what the init_hook gives", registered.dist_module.__name__, ", ".join(left))
    kwargs = {**{key: value for key, value in kwargs.items() if key not in left}, **config}
    distributed = registered.dist_module(*args, **kwargs)
    _take_values(name, distributed, module, registered)
    if registered.forward_hook is not None or registered.return_hook is not None:
        override(distributed, "forward", _translated, registered.forward_hook, registered.return_hook)
    set_tensor_parallelism(distributed, True, **mark.config)
    return distributed.train(module.training)


def _translated(original: Hook, forward_hook: Hook | None, return_hook: Hook | None) -> Hook:
    """The forward of a distributed module with the signature of the one that it replaces."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if forward_hook is not None:
            args, kwargs = _pair(forward_hook(*args, **kwargs), "forward_hook", type(self))
        result = original(self, *args, **kwargs)
        return result if return_hook is None else return_hook(result)

    return forward


def _pair(result: Any, hook: str, cls: type) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping):
        args, kwargs = result
        if not isinstance(args, (Tensor, str)) and hasattr(args, "__iter__"):
            return tuple(args), dict(kwargs)
    raise ArgumentError(
        f"the {hook} for {cls.__name__} returned {shown(result)}; return a pair: the positional arguments as a tuple, "
        "and the keyword arguments as a dict"
    )


def _parameters_of(cls: type[nn.Module]) -> set[str] | None:
    """The names of a constructor's arguments; None if it accepts any keyword."""
    parameters = inspect.signature(cls).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return {parameter.name for parameter in parameters}


@torch.no_grad()
def _take_values(name: str, distributed: nn.Module, module: nn.Module, registered: Registered) -> None:
    state = module.state_dict()
    if registered.state_hook is not None:
        distributed.load_state_dict(registered.state_hook(state))
        return
    target = distributed.state_dict()
    if target.keys() == state.keys() and all(target[key].shape == state[key].shape for key in target):
        adopt_state(distributed, module)
        return
    logger.warning(
        "%s (%s) is replaced by a %s of other parameters, which has new initial values; give tp_register a state_hook "
        "to carry the values over, or load a state dict into the wrapped model",
        name, type(module).__name__, type(distributed).__name__,
    )  # fmt: skip


def _check_keywords(model: nn.Module, used: set[str]) -> None:
    """Raise for enabled keywords of marks that no module accepts; log those without effect."""
    marks = [mark for module in model.modules() if (mark := mark_of(module)) is not None]
    asked = {key for mark in marks for key, value in mark.config.items() if value is not None and value is not False}
    for key in sorted(asked & WITHOUT_EFFECT.keys()):
        logger.info("%s of tensor_parallelism changes nothing here: %s", key, WITHOUT_EFFECT[key])
    unknown = sorted(asked - used)
    if unknown:
        raise ArgumentError(
            f"tensor_parallelism was given {', '.join(unknown)}, but no registered module is replaced by one with such "
            f"an argument; {near_miss(unknown[0], used)}"
        )
