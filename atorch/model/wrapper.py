"""A transparent wrapper of the user's module.

Wrappers such as DistributedDataParallel prefix every name with `module.` and hide the attributes of the wrapped module.
A class that inherits from `Wrapper` first has the names, state dicts and attributes of `self.module`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn


class Wrapper(nn.Module):
    """Base of wrappers: `self.module` is the user's module, and the wrapper uses its names."""

    module: nn.Module

    @property
    def training(self) -> bool:
        """The mode of the user's module, which wrapping does not change."""
        module = self.__dict__.get("_modules", {}).get("module")
        return True if module is None else bool(module.training)

    @training.setter
    def training(self, mode: bool) -> None:
        module = self.__dict__.get("_modules", {}).get("module")
        if module is not None:  # None while nn.Module's constructor sets the default
            module.training = mode

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":  # read before the constructor has set it
                raise
            return getattr(self.module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        module = self.__dict__.get("_modules", {}).get("module")
        if module is not None and isinstance(value, torch.Tensor):
            for held in (module._parameters, module._buffers):
                if name in held:
                    held[name] = value  # torch.func.functional_call sets tensors temporarily
                    return
        super().__setattr__(name, value)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """The user's modules by the user's names; `named_parameters` and `named_buffers` use this."""
        yield from self.module.named_modules(memo, prefix, remove_duplicate)

    def _fqn_modifiers(self) -> dict[str, str]:
        """Names that tell torch.distributed.checkpoint to omit the prefix `module`."""
        return {"module": "module"} | {name: "module" for name, _ in self.module.named_children()}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Delegate to the user's module, which may store gradients elsewhere."""
        self.module.zero_grad(set_to_none)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load into the user's module, by the user's names."""
        return self.module.load_state_dict(state_dict, strict=strict, assign=assign)
