"""Embeddings that stay on the host: looked up there in fp32, and stepped there as ordinary parameters.

A step reads a few rows of a table, so copying the rows to the device is far cheaper than copying the table. A table
that another module shares, such as a tied head, is moved to the device as usual.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from atorch.model.method_override import override


def host_embeddings(model: nn.Module) -> set[str]:
    """The names of the embeddings that can stay on the host: plain dense ones with an unshared table."""
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    return {
        name
        for name, module in model.named_modules()
        if type(module) is nn.Embedding and not module.sparse and uses[id(module.weight)] == 1
    }


def table_of(name: str) -> str:
    return f"{name}.weight" if name else "weight"


def look_up_on_host(module: nn.Module, dtype: torch.dtype) -> None:
    """Make `module` look up on its table's device, and return rows in `dtype` on the indices' device."""
    override(module, "forward", _on_host, dtype)


def foresee_lookups(duplicate: nn.Module, names: Collection[str], dtype: torch.dtype) -> None:
    """Make these embeddings of a copy return zero rows without their table, which the device never holds."""
    for name in names:
        module: Any = duplicate.get_submodule(name)
        module.forward = partial(_rows, width=module.embedding_dim, dtype=dtype)


def _on_host(forward: Callable[[nn.Module, Tensor], Tensor], dtype: torch.dtype) -> Callable[..., Tensor]:
    def run(self: Any, input: Tensor) -> Tensor:
        rows = forward(self, input.to(self.weight.device))
        return rows.to(input.device, dtype)

    return run


def _rows(input: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(*input.shape, width, dtype=dtype, device=input.device, requires_grad=torch.is_grad_enabled())
