"""The layout that tensor_parallel derived, as a strategy's file keeps it: what is read back need not be derived."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError
from torch import nn

from atorch.errors import shown
from atorch.runtime.tensor_parallel.model_layout import ModelLayout, why_not_of

KEY = "tensor_layout"
"""Its key in a strategy's metadata."""


def written(layout: ModelLayout, asked: Mapping[str, Any]) -> dict[str, Any]:
    """The layout, and what was asked of it, by the names of the knobs, as JSON data."""
    return {**asked, **_adapter().dump_python(layout, mode="json")}


def read_layout(kept: Any, model: nn.Module, degree: int, asked: Mapping[str, Any]) -> ModelLayout | str:
    """The layout in `kept`, or why it is not this model's, as is asked, on so many processes."""
    if not isinstance(kept, Mapping) or any(kept.get(name) != value for name, value in asked.items()):
        return f"it was derived by another {' or '.join(asked)}"
    try:
        layout = _adapter().validate_python({name: value for name, value in kept.items() if name not in asked})
    except ValidationError as error:
        fault = error.errors()[0]
        return f"{'.'.join(map(str, fault['loc']))} is {shown(fault['input'])}: {fault['msg']}"
    return why_not_of(layout, model, degree) or layout


def _adapter() -> TypeAdapter[ModelLayout]:
    return TypeAdapter(ModelLayout)
