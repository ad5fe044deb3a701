"""Tensor parallelism for any model: the layout is derived from the model itself, and validated before it is applied."""

from atorch.runtime.tensor_parallel.layout import BlockLayout, Rows, SplitRegion, Unsplit
from atorch.runtime.tensor_parallel.model_layout import ModelLayout
from atorch.runtime.tensor_parallel.split import apply_layout, derive_layout, tensor_parallel
from atorch.runtime.tensor_parallel.state import whole_state

__all__ = [
    "BlockLayout",
    "SplitRegion",
    "Unsplit",
    "ModelLayout",
    "Rows",
    "apply_layout",
    "derive_layout",
    "tensor_parallel",
    "whole_state",
]
