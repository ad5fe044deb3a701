"""Sharded parameters whose factories make plain tensors, as the code of a model means them to.

`next(self.parameters()).new_zeros(…)` is how models make hidden states, and `torch.zeros_like(parameter)` how they make
accumulators. A sharded parameter would make tensors of its own kind, which mix with no plain one. An optimizer means
its own kind by `zeros_like`: functions that take a parameter make plain tensors in a forward pass only. What was made
of `parameter.data` outside of one is made plain where the model is given it.

Three uses cannot work, and are named: of a parameter that is sharded while a module reads it that does not hold it, of
the parameter that a sharded one has replaced, which a function's cell or a list may still hold, and `parameter.data =
value`, which reaches no shard.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map

from atorch.errors import ArgumentError
from atorch.runtime.chunk.parameter import is_descriptive
from atorch.runtime.fsdp.sharded_access import READING, Outside
from atorch.runtime.gradients.weak_method import weakly

if TYPE_CHECKING:
    from atorch.runtime.fsdp.collectives import FsdpPasses

_FACTORIES = ("new", "new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros")
_LIKE = ("empty_like", "full_like", "ones_like", "rand_like", "randint_like", "randn_like", "zeros_like")
_TENSOR: Any = Tensor
_MAKING = frozenset([*(getattr(_TENSOR, name) for name in _FACTORIES), *(getattr(torch, name) for name in _LIKE)])
_HARMLESS = frozenset([_TENSOR.grad.__get__, _TENSOR.grad.__set__, _TENSOR.__repr__, _TENSOR.__hash__])


def make_plain_tensors(root: nn.Module, passes: FsdpPasses | None = None) -> None:
    """Let the sharded parameters of `root` make plain tensors: their methods always, functions in its forward.

    passes: what compares the processes' passes; None on a single process.
    """
    sharded = {name: each for name, each in root.named_parameters() if isinstance(each, DTensor)}
    for path, parameter in sharded.items():
        parameter.path = path  # type: ignore[attr-defined]
        parameter.meet = None if passes is None else weakly(passes.meet)  # type: ignore[attr-defined]
        for name in _FACTORIES:
            setattr(parameter, name, partial(_made, name, parameter.dtype, parameter.device))

    assigned = _Assigned(sharded)

    def enter(_: nn.Module, args: Any, kwargs: Any) -> Any:
        assigned.refuse()
        _become(_InForward, sharded.values())
        if any(isinstance(each, DTensor) for each in tree_leaves((args, kwargs))):
            return tree_map(_plain, (args, kwargs))
        return None

    root.register_forward_pre_hook(enter, with_kwargs=True)
    _become(Outside, sharded.values())
    root.register_forward_hook(lambda *_: _become(Outside, sharded.values()), always_call=True)
    root.register_state_dict_pre_hook(lambda *_: assigned.refuse())


class _Assigned:
    """Sharded parameters, of which `.data` may be assigned: that changes a DTensor's shell and not its shard."""

    def __init__(self, sharded: Mapping[str, DTensor]) -> None:
        self._sharded = sharded
        self._known = {name: _shell_and_shard(each) for name, each in sharded.items()}

    def refuse(self) -> None:
        """Say so where it happened.

        Raises:
            ArgumentError: `.data` of a parameter was assigned.
        """
        for name, parameter in self._sharded.items():
            shell, shard = _shell_and_shard(parameter)
            if shell == self._known[name][0]:
                continue
            if shard is self._known[name][1]:
                raise ArgumentError(
                    f"{name}.data was assigned, which does not reach the shards of a sharded parameter: write "
                    "`parameter.data.copy_(value)`, and keep `parameter.data.clone()` of what you will put back"
                )
            self._known[name] = shell, shard  # moved as a whole, by model.to() or such


def _shell_and_shard(parameter: DTensor) -> tuple[int, Tensor]:
    with torch._C.DisableTorchFunctionSubclass():
        return parameter.untyped_storage()._cdata, parameter._local_tensor


def refuse_replaced(root: nn.Module, before: Mapping[str, nn.Parameter]) -> None:
    """Let each parameter that `root` has no more raise when something that still holds it computes with it.

    before: the parameters that `root` had, by name.
    """
    staying = set(root.parameters())
    for name, parameter in before.items():
        if parameter not in staying and type(parameter) is nn.Parameter:
            parameter.__class__ = _Replaced
            parameter.path = name  # type: ignore[attr-defined]


class _Replaced(nn.Parameter):
    """A parameter in whose place the model has a sharded one; its values are those of before training."""

    path: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Say what is known without values.

        Raises:
            ArgumentError: a computation takes it.
        """
        with torch._C.DisableTorchFunctionSubclass():
            if func in _HARMLESS or is_descriptive(func):
                return func(*args, **(kwargs or {}))
        held = next((each for each in (*args, *(kwargs or {}).values()) if isinstance(each, cls)), None)
        name = "a parameter" if held is None else held.path
        raise ArgumentError(
            f"{name} is sharded, and something computes with the tensor that it was before, which is trained no more: "
            "a closure, a default argument, a list or a functools.partial holds it. Read it as an attribute of its "
            f"module where it is used, or keep it whole: atorch_ignored_cls=({name!r},)"
        )


def _plain(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) and not isinstance(value, nn.Parameter) else value


def _as_read(parameter: _InForward, value: Any) -> Any:
    """Mark what was made of a parameter, such as a part of it: it meets plain tensors no more than that."""
    if type(value) is DTensor:
        value.path, value.meet = parameter.path, parameter.meet  # type: ignore[attr-defined]
        _become(_InForward, [value])
    return value


def _become(kind: type[DTensor], parameters: Iterable[Tensor]) -> None:
    for parameter in parameters:
        parameter.__class__ = kind


class _InForward(DTensor):
    """A sharded parameter while its model runs forward."""

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Make plain tensors; do everything else as ever."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in _MAKING and isinstance(args[0], cls):
                like = args[0]
                plain = torch.empty((), dtype=like.dtype, device=like.device).expand(like.shape)
                return func(plain, *args[1:], **kwargs)
            if getattr(func, "__name__", "") in READING and isinstance(args[0], cls):
                raise _sharded_where_read(args[0])
            try:
                result = func(*args, **kwargs)
            except RuntimeError as error:
                _explain(error, cls, (*args, *kwargs.values()))
                raise
            of = next((each for each in args if isinstance(each, cls)), None)
            return result if of is None else tree_map(partial(_as_read, of), result)


def _explain(error: RuntimeError, kind: type[Tensor], given: Iterable[Any]) -> None:
    """Raise `error` in words of the user's where a sharded parameter met plain tensors."""
    tensors = [each for each in given if isinstance(each, Tensor)]
    read = next((each for each in tensors if isinstance(each, kind)), None)
    if read is None or all(isinstance(each, DTensor) for each in tensors):
        return
    raise _sharded_where_read(read) from error


def _sharded_where_read(read: Any) -> ArgumentError:
    name = read.path
    return ArgumentError(
        f"{name} is sharded where it is read: a module is gathered for its own forward, and another one reads it. Call "
        "the module that holds it, gather both in one by atorch_wrap_cls (their common parent), or keep the parameter "
        f"whole: atorch_ignored_cls=({name!r},)"
    )


def _made(name: str, dtype: torch.dtype, device: torch.device, *args: Any, **kwargs: Any) -> Tensor:
    made: Tensor = getattr(torch.empty(0, dtype=dtype, device=device), name)(*args, **kwargs)
    return made
