"""Compilation of modules in place. Blocks of one class are compiled one by one: the first pays, the others reuse it.

Compiling a whole model takes as long as it has layers; compiling its repeated block takes as long as one layer, and
loses little, since the time is spent inside the blocks (torch's "regional compilation").
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn


def compile_in_place(
    modules: Iterable[nn.Module],
    *,
    backend: str | Callable[..., Any] = "inductor",
    mode: str | None = None,
    dynamic: bool | None = None,
    fullgraph: bool = False,
) -> None:
    """Compile the call of each of `modules`, hooks included, when it first runs. Names and `state_dict` stay.

    The knobs are those of `torch.compile`.
    """
    for module in modules:
        module.compile(backend=backend, mode=mode, dynamic=dynamic, fullgraph=fullgraph)
