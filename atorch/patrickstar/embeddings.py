"""Embeddings that stay on the host: looked up there in fp32, and stepped there as ordinary parameters.

Of a table a step reads a few rows, so that bringing it to the device costs far more than taking the rows to it. One
that another module has too, such as a tied head, comes to the device anyway and is not left out.
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
    """The names of the embeddings that can stay: plain dense ones with a table of their own."""
    uses = Counter(id(each) for _, each in model.named_parameters(remove_duplicate=False))
    return {
        name
        for name, module in model.named_modules()
        if type(module) is nn.Embedding and not module.sparse and uses[id(module.weight)] == 1
    }


def table_of(name: str) -> str:
    return f"{name}.weight" if name else "weight"


def look_up_on_host(module: nn.Module, dtype: torch.dtype) -> None:
    """From now on `module` looks up where its table is, and gives rows in `dtype` where the indices are."""
    override(module, "forward", _on_host, dtype)


def foresee_lookups(duplicate: nn.Module, names: Collection[str], dtype: torch.dtype) -> None:
    """Let these embeddings of a copy give rows without a table, which the device never sees."""
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
