"""Counts what passes by while a model runs: FLOPs, bytes moved, operations, and what is saved for backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from atorch.cost import Matmul
from atorch.profiler.tensors import tensor_bytes, tensors_of


@dataclass
class Count:
    """What was seen inside one block, or outside of all."""

    matmuls: list[Matmul] = field(default_factory=list)
    attention_flops: float = 0.0
    traffic_bytes: float = 0.0
    num_ops: int = 0
    activation_bytes: int = 0
    input_bytes: int = 0
    largest_bytes: int = 0


class Counter:
    """The counts of one forward pass of `model`, whole and by block."""

    def __init__(self, model: nn.Module) -> None:
        self.output_bytes = 0
        self.blocks: dict[str, Count] = {}
        self.rest = Count()
        self._inside: list[Count] = [self.rest]
        # Storages by identity. They are kept, so that none is freed and its address taken by another.
        self._saved: dict[int, torch.UntypedStorage] = {}
        self._inputs: dict[int, torch.UntypedStorage] = {}
        self._weights = {_key(p): p.untyped_storage() for p in [*model.parameters(), *model.buffers()]}

    @contextmanager
    def watching(self, blocks: Mapping[str, nn.Module]) -> Iterator[None]:
        """Count what happens inside, also for each of `blocks` by itself."""
        handles = []
        for name, block in blocks.items():
            count = self.blocks.setdefault(name, Count())
            handles.append(block.register_forward_pre_hook(self._entering(count), with_kwargs=True))
            handles.append(block.register_forward_hook(self._leaving, always_call=True))
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._save, lambda tensor: tensor), _Operations(self):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _entering(self, count: Count) -> Callable[..., None]:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._inside.append(count)
            for tensor in tensors_of((args, kwargs)):
                if _add(self._inputs, tensor):
                    count.input_bytes += tensor.untyped_storage().nbytes()

        return enter

    def _leaving(self, module: nn.Module, args: Any, output: Any) -> None:
        self._inside.pop()

    def _save(self, tensor: torch.Tensor) -> torch.Tensor:
        if _key(tensor) not in self._weights and _add(self._saved, tensor):
            self._inside[-1].activation_bytes += tensor.untyped_storage().nbytes()
        return tensor

    def operation(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Count one call of an aten operation."""
        packet, here = func._overloadpacket, self._inside[-1]
        if packet in _ATTENTION:
            here.attention_flops += _ATTENTION[packet](args)
        elif packet in flop_registry:
            flops = flop_registry[packet](*args, **kwargs, out_val=out)
            here.matmuls.append(Matmul(rows=flops / 2.0, inner=1, columns=1))
        elif func.is_view or func.namespace == "prim" or packet in _FREE:
            return
        else:
            here.traffic_bytes += sum(map(tensor_bytes, tensors_of((args, kwargs, out))))
        here.num_ops += 1
        here.largest_bytes = max(here.largest_bytes, 0, *map(tensor_bytes, tensors_of(out)))


class _Operations(TorchDispatchMode):
    """Hands every operation to the counter after it ran."""

    def __init__(self, counter: Counter) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counter = counter

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.counter.operation(func, args, kwargs, out)
        return out


def _attention_flops(args: tuple[Any, ...]) -> float:
    """Forward FLOPs of scaled dot-product attention on query, key, value of shape (batch, heads, seq, head_dim)."""
    query, key, value = args[:3]
    return float(sdpa_flop_count(query.shape, key.shape, value.shape))


_aten = torch.ops.aten
_ATTENTION: Mapping[Any, Callable[[tuple[Any, ...]], float]] = dict.fromkeys(
    (
        _aten._scaled_dot_product_flash_attention_for_cpu,
        _aten._scaled_dot_product_flash_attention,
        _aten._scaled_dot_product_efficient_attention,
        _aten._scaled_dot_product_cudnn_attention,
    ),
    _attention_flops,
)
_FREE = frozenset((_aten.detach, _aten.empty, _aten.empty_like, _aten.empty_strided, _aten.lift_fresh))


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _add(storages: dict[int, torch.UntypedStorage], tensor: torch.Tensor) -> bool:
    """Keep the tensor's storage; whether it was not there."""
    known = _key(tensor) in storages
    storages.setdefault(_key(tensor), tensor.untyped_storage())
    return not known
