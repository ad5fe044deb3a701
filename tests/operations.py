"""Observers of torch: the operations that it dispatches, and the bytes that autograd saves."""

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

ATEN = torch.ops.aten


class Watch(TorchDispatchMode):
    """Calls `see(operation, args, kwargs, result)` after each operation."""

    def __init__(self, see: Callable[[Any, Sequence[Any], Mapping[str, Any], Any], object]) -> None:
        super().__init__()
        self._see = see

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._see(func, args, kwargs or {}, out)
        return out


def operations(run: Callable[[], object]) -> Counter[str]:
    """The number of runs of each operation, by name."""
    counts = Counter[str]()
    with Watch(lambda func, *_: counts.update([func.overloadpacket.__name__])):
        run()
    return counts


def copied(run: Callable[[], object]) -> list[int]:
    """The elements of what is copied into another memory, in order."""
    sizes: list[int] = []
    with Watch(lambda func, args, *_: sizes.append(args[1].numel()) if func is ATEN.copy_.default else None):
        run()
    return sizes


def waited_for(run: Callable[[], object]) -> list[bool]:
    """Of each copy from an accelerator to host memory, whether it is waited for."""
    waited: list[bool] = []

    def see(func: Any, args: Any, kwargs: Any, out: Any) -> None:
        if func is ATEN._to_copy.default and args[0].device.type == "cuda" and out.device.type == "cpu":
            waited.append(not kwargs.get("non_blocking", False))

    with Watch(see):
        run()
    return waited


def holding_casts(held: dict[int, Tensor]) -> Watch:
    """A mode that adds to the tensors `held`, by storage, the casts of them."""

    def see(func: Any, args: Any, _: Any, out: Any) -> None:
        if func is ATEN._to_copy.default and args[0].untyped_storage()._cdata in held:
            held[out.untyped_storage()._cdata] = out

    return Watch(see)


@contextmanager
def saved_bytes(known: Container[int] = ()) -> Iterator[list[int]]:
    """The bytes that autograd keeps for backward, each storage once and the `known` apart, in a list of one number."""
    kept: dict[int, torch.UntypedStorage] = {}
    total: list[int] = []

    @torch.compiler.disable
    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            kept[storage._cdata] = storage
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        yield total
    total.append(sum(storage.nbytes() for storage in kept.values()))


def storages(tensors: Iterable[Tensor]) -> dict[int, Tensor]:
    """The tensors by the key of their storage."""
    return {tensor.untyped_storage()._cdata: tensor for tensor in tensors}
