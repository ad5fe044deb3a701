"""Sharded parameters whose factories make plain tensors, as the code of a model means them to.

`next(self.parameters()).new_zeros(…)` is how models make hidden states, and `torch.zeros_like(parameter)` how they make
accumulators. A sharded parameter would make tensors of its own kind, which mix with no plain one. An optimizer means
its own kind by `zeros_like`: functions that take a parameter make plain tensors in a forward pass only.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

_FACTORIES = ("new", "new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros")
_LIKE = ("empty_like", "full_like", "ones_like", "rand_like", "randint_like", "randn_like", "zeros_like")
_TENSOR: Any = Tensor
_MAKING = frozenset([*(getattr(_TENSOR, name) for name in _FACTORIES), *(getattr(torch, name) for name in _LIKE)])
_SAME = frozenset([_TENSOR.data.__get__, _TENSOR.detach])


def make_plain_tensors(root: nn.Module) -> None:
    """Let the sharded parameters of `root` make plain tensors: their methods always, functions in its forward."""
    sharded = [each for each in root.parameters() if isinstance(each, DTensor)]
    for parameter in sharded:
        for name in _FACTORIES:
            setattr(parameter, name, partial(_made, name, parameter.dtype, parameter.device))
    root.register_forward_pre_hook(lambda *_: _become(_InForward, sharded))
    root.register_forward_hook(lambda *_: _become(DTensor, sharded), always_call=True)


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
            result = func(*args, **kwargs)
            if func in _SAME:
                _become(cls, [result])
            return result


def _made(name: str, dtype: torch.dtype, device: torch.device, *args: Any, **kwargs: Any) -> Tensor:
    made: Tensor = getattr(torch.empty(0, dtype=dtype, device=device), name)(*args, **kwargs)
    return made
