"""Facts of a running backward pass: the leaves that it is asked for, and its order.

Leaves may be all, those in `loss.backward(inputs=…)`, or `torch.autograd.grad`'s. Functions that communicate, or whose
inputs backward frees, have first-order gradients only.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import Node, get_gradient_edge

from atorch.errors import ArgumentError


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """The bound method `method`, which does nothing once its object is gone.

    C++ holds post-accumulate hooks, which Python's garbage collector cannot see. So an object that refers to a tensor
    on which its own method is such a hook would never be freed.
    """
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        bound = reference()
        return None if bound is None else bound(*args)

    return call


def can_be_reached(leaf: torch.Tensor) -> bool:
    """True if a function may take a leaf as an input only to find out whether its gradient is asked for.

    If the function then returns no gradient for it, autograd still calls the leaf's hooks, with None. Most hooks do not
    expect that.
    """
    hooks = [*(leaf._backward_hooks or {}).values(), *(leaf._post_accumulate_grad_hooks or {}).values()]
    return leaf.is_leaf and leaf.requires_grad and all(hasattr(hook, "expects_none") for hook in hooks)


def expects_none(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Mark `hook` as callable without a gradient."""
    hook.expects_none = True  # type: ignore[attr-defined]
    return hook


class Postponed:
    """A user's hook on a gradient, which would see a gradient that is not yet averaged or complete.

    Args:
        later: called instead of the hook, with this object and the parameter.
        parameter: for a `register_hook` hook, which takes the parameter's gradient and may return another. None for a
            `register_post_accumulate_grad_hook` hook, which takes the parameter.
    """

    expects_none = True

    def __init__(
        self,
        hook: Callable[[torch.Tensor], Any],
        later: Callable[[Postponed, torch.Tensor], Any],
        parameter: torch.Tensor | None = None,
    ) -> None:
        self.hook, self._later = hook, later
        self._parameter = None if parameter is None else weakref.ref(parameter)  # weak, as C++ holds this hook

    @property
    def takes_gradient(self) -> bool:
        """True for a hook of `register_hook`."""
        return self._parameter is not None

    def __call__(self, value: torch.Tensor | None) -> Any:
        parameter = value if self._parameter is None else self._parameter()
        if parameter is None or value is None:
            return None
        if self.takes_gradient and is_captured(get_gradient_edge(parameter).node):
            return self.hook(value)
        self._later(self, parameter)
        return None

    def changed(self, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient after a `register_hook` hook."""
        changed = self.hook(gradient)
        return gradient if changed is None else changed


def is_own(hook: Any) -> bool:
    inner = getattr(hook, "func", hook)  # of a partial
    module = getattr(inner, "__module__", None) or type(inner).__module__
    return hasattr(hook, "expects_none") or module.partition(".")[0] == "atorch"


def has_users_hooks(parameter: torch.Tensor, accumulated: bool = True) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        hooks = [*(parameter._backward_hooks or {}).values()]
        if accumulated:
            hooks += (parameter._post_accumulate_grad_hooks or {}).values()
    return not all(map(is_own, hooks))


def postpone(parameters: Iterable[torch.Tensor], later: Callable[[Postponed, torch.Tensor], Any]) -> None:
    """Replace users' hooks on gradients by `Postponed` ones."""
    for parameter in parameters:
        for held, of in ((parameter._backward_hooks, parameter), (parameter._post_accumulate_grad_hooks, None)):
            hooks: dict[Any, Any] = held or {}
            for key in [key for key, hook in hooks.items() if not is_own(hook)]:
                hooks[key] = Postponed(hooks[key], later, of)  # in place, so that its handle still removes it


def postponed(parameter: torch.Tensor) -> list[Postponed]:
    """The postponed hooks of a parameter in the order in which they run: on its gradient, then post-accumulate."""
    hooks = (*(parameter._backward_hooks or {}).values(), *(parameter._post_accumulate_grad_hooks or {}).values())
    return [hook for hook in hooks if isinstance(hook, Postponed)]


@contextmanager
def without_user_hooks(parameters: Iterable[torch.Tensor], user_hooks: Collection[int] | None = None) -> Iterator[None]:
    """Inside, users' hooks on gradients are not called, since an optimizer may step in them.

    user_hooks: ids of `register_hook` hooks that are users'; others belong to a method. None: all are users'.
    """
    muted_hooks: list[tuple[dict[int, Any], int, Any]] = []
    with torch._C.DisableTorchFunctionSubclass():
        hooks_of = [(parameter._backward_hooks, parameter._post_accumulate_grad_hooks) for parameter in parameters]
        for hooks, is_before in [(of, of is before) for before, after in hooks_of for of in (before, after) if of]:
            users = {key: hook for key, hook in hooks.items() if isinstance(hook, Postponed) or not is_own(hook)}
            if is_before and user_hooks is not None:
                users = {key: hook for key, hook in users.items() if id(getattr(hook, "hook", hook)) in user_hooks}
            muted_hooks += [(hooks, key, hook) for key, hook in users.items()]
            hooks.update(dict.fromkeys(users, expects_none(lambda given: None)))
    try:
        yield
    finally:
        for hooks, key, hook in muted_hooks:
            hooks[key] = hook


class OtherGradients:
    """Gradients of leaves that are not a model's, such as a criterion's weights, from before trial passes."""

    def __init__(self) -> None:
        self._before: dict[torch.Tensor, torch.Tensor | None] = {}

    def note(self, loss: torch.Tensor, model: nn.Module) -> None:
        """Note the leaves that backward of `loss` reaches, and their gradients, except the model's."""
        own, seen, waiting = set(model.parameters()), set[Node](), [loss.grad_fn]
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
            leaf = getattr(node, "variable", None)
            if leaf is not None and leaf not in own and leaf not in self._before:
                self._before[leaf] = None if leaf.grad is None else leaf.grad.clone()

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [leaf for leaf in self._before if isinstance(leaf, nn.Parameter)]

    def restore(self) -> None:
        for leaf, gradient in self._before.items():
            leaf.grad = gradient


def is_captured(accumulator: Node) -> bool:
    """True if the gradient of a leaf goes to the caller of `torch.autograd.grad`. Only for calls in backward."""
    return not _goes_to_the_leaf(accumulator)


def is_asked(accumulator: Node) -> bool:
    """True if the running backward pass computes the gradient of a leaf, for `.grad` or `torch.autograd.grad`."""
    return not _goes_to_the_leaf(accumulator) or torch._C._will_engine_execute_node(accumulator)


def _goes_to_the_leaf(accumulator: Node) -> bool:
    try:
        torch._C._will_engine_execute_node(accumulator)
    except RuntimeError as error:
        if "autograd.grad" not in str(error):  # torch raises this one only for captured leaves
            raise
        return False
    return True


Map = Callable[[Tensor], Tensor]


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Make `backward` of a communicating autograd function raise a clear error for second-order gradients."""
    once = once_differentiable(backward)

    @wraps(backward)
    def named(ctx: Any, *grads: Any) -> Any:
        if not torch.compiler.is_compiling():
            refuse_second_order("what is split over processes (tensor, sequence, context)")
        return once(ctx, *grads)

    return named


class _Both(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Map, backward: Map) -> Tensor:
        ctx.map = backward
        return forward(x)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.map(grad), None, None


def mapped(x: Tensor, forward: Map, backward: Map) -> Tensor:
    """`forward(x)`; `backward` maps its gradient to that of `x`, to first order only."""
    return _Both.apply(x, forward, backward)  # type: ignore[no-any-return, no-untyped-call]


def refuse_transforms(*_: Any) -> None:
    """As a forward pre-hook, raise if a sharded model is called within torch.func's transforms."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise ArgumentError(
            "a model of which processes hold parts was called within torch.func (grad, vmap, jvp), which sees one part "
            "alone; train with ddp or zero1, or use torch.func within the model's forward"
        )


def refuse_second_order(under: str) -> None:
    """In a backward pass, raise if it was called with `create_graph=True`."""
    if torch.is_grad_enabled():
        raise ArgumentError(
            f"create_graph=True was given, and gradients of gradients, as a gradient penalty needs them, are beyond "
            f"{under}; train with ddp or zero1, which compute them"
        )
