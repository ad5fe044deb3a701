"""Leaves that a backward pass was asked for: all, those in `loss.backward(inputs=…)`, or `torch.autograd.grad`'s."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.graph import Node, get_gradient_edge


def can_be_reached(leaf: torch.Tensor) -> bool:
    """True if a function may have a leaf as its input only to see whether it is asked for.

    Where the function then has no gradient for it, autograd calls the leaf's hooks all the same, with None. Most hooks
    do not expect that.
    """
    hooks = [*(leaf._backward_hooks or {}).values(), *(leaf._post_accumulate_grad_hooks or {}).values()]
    return leaf.is_leaf and leaf.requires_grad and all(hasattr(hook, "expects_none") for hook in hooks)


def expects_none(hook: Callable[..., Any]) -> Callable[..., Any]:
    """`hook`, which may be called without a gradient."""
    hook.expects_none = True  # type: ignore[attr-defined]
    return hook


class Postponed:
    """A user's hook on a gradient, which would see what is not averaged or whole yet.

    Args:
        later: called in its place, with itself and the parameter.
        parameter: of which the hook takes the gradient (`register_hook`), and may give another; None: the hook takes
            the parameter once that has its gradient (`register_post_accumulate_grad_hook`).
    """

    expects_none = True

    def __init__(
        self,
        hook: Callable[[torch.Tensor], Any],
        later: Callable[[Postponed, torch.Tensor], Any],
        parameter: torch.Tensor | None = None,
    ) -> None:
        self.hook, self._later = hook, later
        self._parameter = None if parameter is None else weakref.ref(parameter)  # which C++ lets hold this

    @property
    def takes_gradient(self) -> bool:
        """True if it was registered by `register_hook`."""
        return self._parameter is not None

    def __call__(self, given: torch.Tensor | None) -> Any:
        parameter = given if self._parameter is None else self._parameter()
        if parameter is None or given is None:
            return None
        if self.takes_gradient and is_captured(get_gradient_edge(parameter).node):
            return self.hook(given)
        self._later(self, parameter)
        return None

    def changed(self, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient that a hook of `register_hook` makes of one."""
        made = self.hook(gradient)
        return gradient if made is None else made


def is_own(hook: Any) -> bool:
    """True if a hook is this package's."""
    inner = getattr(hook, "func", hook)  # of a partial
    module = getattr(inner, "__module__", None) or type(inner).__module__
    return hasattr(hook, "expects_none") or module.partition(".")[0] == "atorch"


def has_users_hooks(parameter: torch.Tensor, accumulated: bool = True) -> bool:
    """True if a parameter has a hook on its gradient that is not this package's. accumulated: or on itself then."""
    with torch._C.DisableTorchFunctionSubclass():
        hooks = [*(parameter._backward_hooks or {}).values()]
        if accumulated:
            hooks += (parameter._post_accumulate_grad_hooks or {}).values()
    return not all(map(is_own, hooks))


def postpone(parameters: Iterable[torch.Tensor], later: Callable[[Postponed, torch.Tensor], Any]) -> None:
    """Put `Postponed` in the place of the hooks on gradients that are not this package's."""
    for parameter in parameters:
        for held, of in ((parameter._backward_hooks, parameter), (parameter._post_accumulate_grad_hooks, None)):
            hooks: dict[Any, Any] = held or {}
            for key in [key for key, hook in hooks.items() if not is_own(hook)]:
                hooks[key] = Postponed(hooks[key], later, of)  # in place, so that its handle still removes it


def postponed(parameter: torch.Tensor) -> list[Postponed]:
    """Those hooks of a parameter, in the order in which they run: on its gradient, then on itself."""
    hooks = (*(parameter._backward_hooks or {}).values(), *(parameter._post_accumulate_grad_hooks or {}).values())
    return [each for each in hooks if isinstance(each, Postponed)]


@contextmanager
def muted(parameters: Iterable[torch.Tensor], known: Collection[int] | None = None) -> Iterator[None]:
    """Inside, users' hooks on gradients are not called: an optimizer may step in them.

    known: ids of those of `register_hook` that are users'; others are a method's. None: all are.
    """
    held: list[tuple[dict[int, Any], int, Any]] = []
    with torch._C.DisableTorchFunctionSubclass():
        every = [(each._backward_hooks, each._post_accumulate_grad_hooks) for each in parameters]
        for hooks, is_before in [(of, of is before) for before, after in every for of in (before, after) if of]:
            users = {key: each for key, each in hooks.items() if isinstance(each, Postponed) or not is_own(each)}
            if is_before and known is not None:
                users = {key: each for key, each in users.items() if id(getattr(each, "hook", each)) in known}
            held += [(hooks, key, each) for key, each in users.items()]
            hooks.update(dict.fromkeys(users, expects_none(lambda given: None)))
    try:
        yield
    finally:
        for hooks, key, each in held:
            hooks[key] = each


def is_captured(accumulator: Node) -> bool:
    """True if the gradient of a leaf goes to the caller of `torch.autograd.grad`. Called in backward alone."""
    return not _goes_to_the_leaf(accumulator)


def is_asked(accumulator: Node) -> bool:
    """True if the backward pass that runs computes the gradient of a leaf, whoever gets it."""
    return not _goes_to_the_leaf(accumulator) or torch._C._will_engine_execute_node(accumulator)


def _goes_to_the_leaf(accumulator: Node) -> bool:
    try:
        torch._C._will_engine_execute_node(accumulator)
    except RuntimeError as error:
        if "autograd.grad" not in str(error):  # which torch's does not say for such a leaf
            raise
        return False
    return True
