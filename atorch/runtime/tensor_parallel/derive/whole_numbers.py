"""Whole numbers that modules hold, themselves or in a configuration, and their division by name."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn

from atorch.runtime.tensor_parallel.layout.layout import BlockLayout


def is_configuration(value: Any) -> bool:
    """True if a module's attribute is an object that holds plain values, such as a model's configuration."""
    is_plain = not isinstance(value, (nn.Module, Tensor, type)) and not callable(value)
    return is_plain and any(type(attribute) is int for attribute in getattr(value, "__dict__", {}).values())


def divide(block: nn.Module, layout: BlockLayout) -> None:
    """Divide the numbers that the layout names, in place. Configurations are copied first, as others may hold them."""
    for group in layout.groups:
        for path, numbers in group.attributes.items():
            module = block.get_submodule(path)
            copies: dict[str, Any] = {}
            for name, divisor in numbers.items():
                held_as, _, number = name.rpartition(".")
                if held_as and held_as not in copies:
                    copies[held_as] = copy.copy(getattr(module, held_as))
                    setattr(module, held_as, copies[held_as])
                holder = copies.get(held_as, module)
                setattr(holder, number, getattr(holder, number) // divisor)
