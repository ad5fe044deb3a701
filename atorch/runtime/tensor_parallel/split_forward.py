"""The inside of a split forward: boundaries to tensors that are whole on every rank, and a rank's part of parameters.

| forward | backward | where |
|---|---|---|
| `fork`: identity | sum over ranks | tensors that every rank uses whole, each for its part |
| `reduce`: sum over ranks | identity | results of a row split |
| `share`: one rank's share | identity | terms that a sum over ranks must add once |
| `gather`: all parts | its own part | logits of a split vocabulary |

Shoeybi et al. 2019 (arXiv 1909.08053) call the first two f and g.

The module keeps a DTensor, which optimizers, clipping, FSDP2 and state dicts see. Inside a forward of the split block,
`module.weight` returns this rank's plain part, and gradients flow back to the DTensor. So forward code for plain
tensors runs unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from atorch.model.wrapper import override, override_members
from atorch.runtime.gradients.backward import mapped


def fork(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`x` itself; its gradient is summed over the group."""
    return mapped(x, lambda x: x.view_as(x), lambda grad: _summed(grad, group))


def reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of the group's `x`."""
    return mapped(x, lambda x: _summed(x, group), lambda grad: grad)


def _summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, group=group)
    return x


def share(x: Tensor, size: int) -> Tensor:
    """`x / size`, which `size` ranks add up to `x`; the gradient is whole on every rank already."""
    return mapped(x, lambda x: x / size, lambda grad: grad)


def join(x: Tensor, counts: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """The group's `x`, concatenated along the last dim; rank r has `counts[r]` columns. Without gradients."""
    padded = torch.nn.functional.pad(x, (0, max(counts) - x.shape[-1])).contiguous()
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([part[..., :count] for part, count in zip(parts, counts, strict=True)], -1)


def gather(x: Tensor, counts: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """`join`, with the rank's own part of the gradient in backward."""
    rank = dist.get_rank(group)
    start, count = sum(counts[:rank]), counts[rank]
    return mapped(x, lambda x: join(x, counts, group), lambda grad: grad.narrow(-1, start, count))


Read = Callable[[Tensor], Tensor]


class Inside:
    """A flag that is true while a block's forward runs. It is not a hook: recomputation calls forward without hooks.

    All blocks of a model share one flag, so that blocks of one class keep one class.
    """

    def __init__(self) -> None:
        self.depth = 0  # the number of running forwards

    def note(self, block: nn.Module) -> None:
        """Set the flag in forwards of `block` from now on."""
        override(block, "forward", _noted, self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Inside:
        return self  # a copied block reads the same flag

    def __bool__(self) -> bool:
        return self.depth > 0


def _noted(original: Callable[..., Any], inside: Inside) -> Callable[..., Any]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        inside.depth += 1
        try:
            return original(self, *args, **kwargs)
        finally:
            inside.depth -= 1

    return forward


def present(module: nn.Module, reads: Mapping[str, Read], inside: Inside) -> None:
    """Let `module.<name>` be `reads[name](parameter)` inside a block's forward, and the parameter elsewhere.

    The module gets a subclass of its class, with the same name. Modules of that class with equal reads share it, and
    so do deepcopies.
    """
    override_members(module, _properties, _Reads(reads), inside)


class _Reads(dict[str, Read]):
    def __deepcopy__(self, memo: dict[int, Any]) -> _Reads:
        return self  # they refer to process groups, which cannot be copied


def _properties(base: type, reads: _Reads, inside: Inside) -> Mapping[str, property]:
    return {name: _property(name, read, inside) for name, read in reads.items()}


def _property(name: str, read: Read, inside: Inside) -> property:
    def get(module: nn.Module) -> Tensor | None:
        if name not in module._parameters:  # the module belongs to another pipeline stage
            value: Tensor = vars(module)[name]
            return value
        parameter = module._parameters[name]
        return read(parameter) if inside and parameter is not None else parameter

    return property(get)
