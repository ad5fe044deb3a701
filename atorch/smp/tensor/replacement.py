"""Marked modules of a registered class replaced by distributed ones: `smp.tp_register`, `smp.tp_register_with_module`.

A class that is registered notes from then on what its modules are made with, since an `init_hook` is given that. The
registration lies on the class itself.
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
from atorch.model.method_override import is_override, override
from atorch.model.module_swap import Swap, adopt_state, swap_modules
from atorch.smp.activation_checkpointing import OPTIONS
from atorch.smp.nn.distributed_module import WITHOUT_EFFECT
from atorch.smp.tensor.marks import TensorMark, current_mark, mark_of, put_mark, set_tensor_parallelism

C = TypeVar("C", bound=type[nn.Module])
Hook = Callable[..., Any]

_REGISTERED = "_smp_distributed"  # on a class: its Registered
_MADE_WITH = "_smp_made_with"  # on its modules: the arguments


@dataclass(frozen=True)
class Registered:
    """The replacement of a class's modules, and how arguments, results and values are translated."""

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
        return self  # what a module was made with; configurations may hold what cannot be copied


def tp_register(
    dist_module: type[nn.Module],
    init_hook: Hook | None = None,
    forward_hook: Hook | None = None,
    return_hook: Hook | None = None,
    state_hook: Hook | None = None,
) -> Callable[[C], C]:
    """A class decorator: marked modules of the class are replaced by modules of `dist_module`.

    Args:
        dist_module: what computes the same and is split, such as `smp.nn.DistributedTransformer`.
        init_hook: called as the class is, `self` left out; returns (args, kwargs) for `dist_module`. None: the same.
        forward_hook: called as the class's forward is; returns (args, kwargs) for `dist_module`'s. None: the same.
        return_hook: called with what `dist_module` returns; returns what the class would. None: the same.
        state_hook: called with the state dict of the module that is replaced; returns `dist_module`'s. None: the
            values go over where all names and shapes are the same; else the new module has new ones, which is told.

    Raises:
        ArgumentError: `dist_module` is no module class, or a hook no function.
    """

    def register(cls: C) -> C:
        tp_register_with_module(cls, dist_module, init_hook, forward_hook, return_hook, state_hook)
        return cls

    return register


def tp_register_with_module(
    module_cls: type[nn.Module],
    dist_module: type[nn.Module],
    init_hook: Hook | None = None,
    forward_hook: Hook | None = None,
    return_hook: Hook | None = None,
    state_hook: Hook | None = None,
) -> None:
    """`tp_register` for a class that is there. Call it before the modules are made, unless `init_hook` needs no
    arguments of theirs. The arguments are `tp_register`'s.

    Raises:
        ArgumentError: a class is no module class, or a hook no function.
    """
    for name, given in (("module_cls", module_cls), ("dist_module", dist_module)):
        if not (isinstance(given, type) and issubclass(given, nn.Module)):
            raise ArgumentError(f"tp_register was given {name} {shown(given)}; give a subclass of torch.nn.Module")
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
    """The model with its marked modules of registered classes replaced, in place; of nested ones the outermost.

    Another module than `model` comes back where that itself is one of them. What replaces them is marked.

    Raises:
        ArgumentError: a module was made before its class was registered, and a hook needs its arguments; a hook
            returned something else than was asked; a tied parameter has no place in the new module; or a keyword of
            `tensor_parallelism` is known nowhere.
    """
    made: list[nn.Module] = []
    used: set[str] = set(WITHOUT_EFFECT)
    chosen = dict(_outermost(model))

    def replacement(name: str, module: nn.Module) -> nn.Module | None:
        if module not in chosen:
            return None
        made.append(_replacement(name or "the model", module, chosen[module], used))
        return made[-1]

    if model in chosen:
        found = replacement("", model)
        assert found is not None
        model = found
    else:
        swaps: list[Swap] = swap_modules(model, replacement)
        if swaps:
            logger.info("replaced for tensor parallelism: %s", "; ".join(map(str, swaps)))
    _check_keywords(model, used)
    for module in model.modules():
        vars(module).pop(_MADE_WITH, None)  # configurations and the like need not live on
    return model


def _note_arguments(cls: type[nn.Module]) -> None:
    theirs = cls.__init__

    @functools.wraps(theirs)
    def noting(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        theirs(self, *args, **kwargs)
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
    """The registration of a module's own class, beneath what was overridden on the module."""
    own: Any = next(cls for cls in type(module).__mro__ if not is_override(cls))
    registered: Registered | None = vars(own).get(_REGISTERED)
    return registered


def _replacement(name: str, module: nn.Module, registered: Registered, used: set[str]) -> nn.Module:
    made_with: _Arguments | None = vars(module).get(_MADE_WITH)
    if made_with is None:
        cls = type(module).__name__
        raise ArgumentError(
            f"{name} was made before its class {cls} was registered, so that its constructor's arguments are not "
            f"known; call smp.tp_register_with_module({cls}, …) before the model is made"
        )
    if any(OPTIONS in vars(each) for each in module.modules()):
        raise ArgumentError(
            f"{name} ({type(module).__name__}) is to be replaced by a {registered.dist_module.__name__}, and "
            "activation checkpointing was set in it; call smp.set_activation_checkpointing after smp.DistributedModel"
        )
    args, kwargs = made_with.args, dict(made_with.kwargs)
    if registered.init_hook is not None:
        args, kwargs = _pair(registered.init_hook(*args, **kwargs), "init_hook", type(module))
    mark = mark_of(module) or TensorMark()
    own = _parameters_of(registered.dist_module)
    if own is not None:
        own_config = {key: value for key, value in mark.config.items() if key in own}
        used.update(own_config)
        left = sorted(key for key in kwargs if key not in own)
        if left and registered.init_hook is not None:
            logger.info("%s takes no %s of what the init_hook gives", registered.dist_module.__name__, ", ".join(left))
        kwargs = {**{key: value for key, value in kwargs.items() if key in own}, **own_config}
    else:
        used.update(mark.config)
        kwargs = {**kwargs, **mark.config}
    twin = registered.dist_module(*args, **kwargs)
    _take_values(name, twin, module, registered)
    if registered.forward_hook is not None or registered.return_hook is not None:
        override(twin, "forward", _translated, registered.forward_hook, registered.return_hook)
    set_tensor_parallelism(twin, True, **mark.config)
    return twin.train(module.training)


def _translated(theirs: Hook, forward_hook: Hook | None, return_hook: Hook | None) -> Hook:
    """The forward of a distributed module, called as the one that it replaces."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if forward_hook is not None:
            args, kwargs = _pair(forward_hook(*args, **kwargs), "forward_hook", type(self))
        result = theirs(self, *args, **kwargs)
        return result if return_hook is None else return_hook(result)

    return forward


def _pair(given: Any, hook: str, cls: type) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], Mapping):
        args, kwargs = given
        if not isinstance(args, (Tensor, str)) and hasattr(args, "__iter__"):
            return tuple(args), dict(kwargs)
    raise ArgumentError(
        f"the {hook} for {cls.__name__} returned {shown(given)}; return a pair: the positional arguments as a tuple, "
        "and the keyword arguments as a dict"
    )


def _parameters_of(cls: type[nn.Module]) -> set[str] | None:
    """The names of a constructor's arguments; None where it takes any keyword."""
    parameters = inspect.signature(cls).parameters.values()
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters):
        return None
    return {each.name for each in parameters}


@torch.no_grad()
def _take_values(name: str, twin: nn.Module, module: nn.Module, registered: Registered) -> None:
    state = module.state_dict()
    if registered.state_hook is not None:
        twin.load_state_dict(registered.state_hook(state))
        return
    own = twin.state_dict()
    if own.keys() == state.keys() and all(own[key].shape == state[key].shape for key in own):
        adopt_state(twin, module)
        return
    logger.warning(
        "%s (%s) is replaced by a %s of other parameters, which has new initial values; give tp_register a state_hook "
        "to carry the values over, or load a state dict into the wrapped model",
        name, type(module).__name__, type(twin).__name__,
    )  # fmt: skip


def _check_keywords(model: nn.Module, used: set[str]) -> None:
    """Raise for keywords of the marks that ask for something and no module took; say which change nothing."""
    marks = [mark for module in model.modules() if (mark := mark_of(module)) is not None]
    given = {key for mark in marks for key, value in mark.config.items() if value is not None and value is not False}
    for key in sorted(given & WITHOUT_EFFECT.keys()):
        logger.info("%s of tensor_parallelism changes nothing here: %s", key, WITHOUT_EFFECT[key])
    unknown = sorted(given - used)
    if unknown:
        raise ArgumentError(
            f"tensor_parallelism was given {', '.join(unknown)}, but no registered module is replaced by one with such "
            f"an argument; {near_miss(unknown[0], used)}"
        )
