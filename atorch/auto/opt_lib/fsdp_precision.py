"""The types that fsdp gathers parameters in and reduces gradients in, as a strategy file can hold them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict
from torch import nn
from typing_extensions import Self

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

DTYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_NAMES: Mapping[Any, str] = {
    **{dtype: name for name, dtype in DTYPES.items()},
    **{str(dtype): name for name, dtype in DTYPES.items()},
    **{str(dtype).removeprefix("torch."): name for name, dtype in DTYPES.items()},
}


def _as_name(value: Any) -> Any:
    return _NAMES.get(value, value) if isinstance(value, (str, torch.dtype)) else value


Dtype = Annotated[Literal["fp32", "fp16", "bf16"], BeforeValidator(_as_name)]


class MixedPrecision(BaseModel):
    """Types by what they are for; None leaves the parameters' own."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    param_dtype: Dtype | None = None
    """Of gathered parameters, so of forward and backward."""
    reduce_dtype: Dtype | None = None
    """Of the gradients' reduction; None: param_dtype."""
    output_dtype: Dtype | None = None
    """The dtype of the outputs of gathered modules."""
    buffer_dtype: Dtype | None = None
    """The dtype of floating-point buffers, cast once."""
    cast_forward_inputs: bool = True
    """Cast the inputs of every gathered module to param_dtype."""
    cast_root_forward_inputs: bool = True
    """Cast the inputs of the model."""

    @classmethod
    def of_compute(cls, dtype: torch.dtype) -> Self:
        return cls(param_dtype=_NAMES[dtype], reduce_dtype="fp32")

    @staticmethod
    def from_torch(value: Any) -> Any:
        """torch's MixedPrecision and MixedPrecisionPolicy as dicts of what they say; anything else as it is.

        Raises:
            ValueError: a setting of FSDP1's that FSDP2 cannot follow.
        """
        if not is_dataclass(value) or isinstance(value, type):
            return value
        said = {each.name: getattr(value, each.name) for each in fields(value)}
        if said.pop("keep_low_precision_grads", False):
            raise ValueError("keep_low_precision_grads: FSDP2 keeps gradients in the parameters' type; leave it out")
        classes = said.pop("_module_classes_to_ignore", ())
        if any(cls is not nn.modules.batchnorm._BatchNorm for cls in classes):
            raise ValueError("_module_classes_to_ignore: FSDP2 has one precision for all; use atorch_ignored_cls")
        # Settings that are not known here, as newer versions of torch have them, say nothing as long as they are unset.
        unset = {each.name for each in fields(value) if said.get(each.name) == each.default}
        return {name: what for name, what in said.items() if name in MixedPrecision.model_fields or name not in unset}

    def policy(self, *, root: bool = False) -> MixedPrecisionPolicy:
        """torch's policy, of the root or of all others."""
        from torch.distributed.fsdp import MixedPrecisionPolicy

        return MixedPrecisionPolicy(
            param_dtype=self.param_dtype and DTYPES[self.param_dtype],
            reduce_dtype=self.reduce_dtype and DTYPES[self.reduce_dtype],
            output_dtype=self.output_dtype and DTYPES[self.output_dtype],
            cast_forward_inputs=self.cast_root_forward_inputs if root else self.cast_forward_inputs,
        )

    def cast_buffers(self, model: nn.Module) -> None:
        """Cast the floating-point buffers to buffer_dtype, where that is given."""
        if self.buffer_dtype is None:
            return
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.is_floating_point():
                    module._buffers[name] = buffer.to(DTYPES[self.buffer_dtype])
