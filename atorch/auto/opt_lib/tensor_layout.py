"""The layout that tensor_parallel derived, as a strategy's file keeps it: what is read back need not be derived."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError
from torch import nn

from atorch.errors import shown
from atorch.runtime.tensor_parallel.model_layout import ModelLayout, why_not_of

if TYPE_CHECKING:
    from atorch.runtime.tensor_parallel.plan import Plan

KEY = "tensor_layout"
"""Where a strategy's metadata has it."""


def written(layout: ModelLayout, plan: Plan | None) -> dict[str, Any]:
    """The layout, and the plan it was derived by, as JSON data."""
    return {"plan": plan, **_adapter().dump_python(layout, mode="json")}


def read_layout(kept: Any, model: nn.Module, degree: int, plan: Plan | None) -> ModelLayout | str:
    """The layout in `kept`, or why it is not this model's, by this plan, on so many processes."""
    if not isinstance(kept, Mapping) or kept.get("plan") != plan:
        return "it was derived by another plan"
    try:
        layout = _adapter().validate_python({name: value for name, value in kept.items() if name != "plan"})
    except ValidationError as error:
        fault = error.errors()[0]
        return f"{'.'.join(map(str, fault['loc']))} is {shown(fault['input'])}: {fault['msg']}"
    return why_not_of(layout, model, degree) or layout


def _adapter() -> TypeAdapter[ModelLayout]:
    return TypeAdapter(ModelLayout)
