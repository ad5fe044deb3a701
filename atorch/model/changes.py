"""Changes to a model after a strategy was applied to it: parameters that are new, moved or cast."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.weak import WeakIdKeyDictionary

from atorch.errors import ArgumentError


class AddedParameters:
    """Finds the parameters that a model was given since; costs a comparison of ids while nothing was replaced.

    replaces_parameters: False if the modules' own parameters change by themselves, as under FSDP2; then only those of
        new modules are found.
    """

    def __init__(self, model: nn.Module, *, replaces_parameters: bool = True) -> None:
        self._model, self._replaces_parameters = model, replaces_parameters
        self._note()

    def _note(self) -> None:
        modules = list(self._model.modules())
        self._modules = WeakSet(modules)
        self._parameters = WeakIdKeyDictionary(dict.fromkeys(self._model.parameters()))
        self._held = [module._modules for module in modules]
        if self._replaces_parameters:
            self._held += [module._parameters for module in modules]  # type: ignore[misc]
        self._ids = self._now()

    def _now(self) -> list[int]:
        return [id(value) for held in self._held for value in held.values()]

    def find(self) -> list[tuple[str, nn.Parameter]]:
        """Names and parameters of the model that it did not have at the last call."""
        if self._now() == self._ids:
            return []
        found = [
            (f"{path}.{name}".lstrip("."), parameter)
            for path, module in self._model.named_modules()
            for name, parameter in module._parameters.items()
            if isinstance(parameter, nn.Parameter)  # torch.func.functional_call sets other tensors
            and (module not in self._modules or (self._replaces_parameters and parameter not in self._parameters))
        ]
        if found:
            self._note()
        return found


class ConvertedParameters:
    """Detects parameters that were moved or cast; costs a comparison of storages while none was.

    Autograd then accumulates their gradients in new nodes, and DistributedDataParallel has hooks on the old ones.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = list(parameters)
        self._nodes = [get_gradient_edge(parameter).node for parameter in self._parameters]
        self._storages = self._present()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_nodes": []}  # a copied model has other nodes, and no hooks

    def _present(self) -> list[int]:
        return [parameter.untyped_storage()._cdata for parameter in self._parameters]

    def refuse(self) -> None:
        """Raise an ArgumentError if a parameter is on another device or of another dtype than before."""
        storages = self._present()
        if storages == self._storages:
            return
        for parameter, node in zip(self._parameters, self._nodes, strict=False):
            if get_gradient_edge(parameter).node is not node:
                raise ArgumentError(
                    f"a parameter of shape {tuple(parameter.shape)} was moved or cast after auto_accelerate (it is "
                    f"{parameter.dtype} on {parameter.device}), and its gradient would not be averaged over "
                    "processes; move and cast the model before"
                )
        self._storages = storages
