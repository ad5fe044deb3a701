"""A module around the user's that answers as the user's does.

Wrappers such as DistributedDataParallel put every name behind `module.` and hide the attributes of what they wrap.
Inherit from `Wrapper` first, and names, state dicts and attributes are those of `self.module`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn


class Wrapper(nn.Module):
    """Base of wrappers: `self.module` is the user's module, and its names are this one's."""

    module: nn.Module

    @property
    def training(self) -> bool:
        """The user's module's: one that is in eval mode stays so."""
        module = self.__dict__.get("_modules", {}).get("module")
        return True if module is None else bool(module.training)

    @training.setter
    def training(self, mode: bool) -> None:
        module = self.__dict__.get("_modules", {}).get("module")
        if module is not None:  # else the constructor says what is said of any module
            module.training = mode

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":  # asked for before the constructor has set it
                raise
            return getattr(self.module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        module = self.__dict__.get("_modules", {}).get("module")
        if module is not None and isinstance(value, torch.Tensor):
            for held in (module._parameters, module._buffers):
                if name in held:
                    held[name] = value  # torch.func.functional_call puts tensors there for a while
                    return
        super().__setattr__(name, value)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """The user's modules by the user's names. `named_parameters` and `named_buffers` are made of this."""
        yield from self.module.named_modules(memo, prefix, remove_duplicate)

    def _fqn_modifiers(self) -> dict[str, str]:
        """Names by which torch.distributed.checkpoint knows that names begin inside of `module`."""
        return {"module": "module"} | {name: "module" for name, _ in self.module.named_children()}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """The user's module's, which knows where its gradients are."""
        self.module.zero_grad(set_to_none)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load into the user's module, by the user's names."""
        return self.module.load_state_dict(state_dict, strict=strict, assign=assign)
