"""Options of tracing and gradient averaging: the arguments of `smp.DistributedModel`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

import torch

from atorch.errors import ArgumentError, check_bools, shown
from atorch.logs import logger, speaking


@dataclass(frozen=True)
class ModelOptions:
    """Options of a model's tracing, and of its gradients' averaging."""

    trace_device: Literal["cpu", "gpu"] = "gpu"
    trace_execution_times: bool = False
    overlapping_allreduce: bool = True
    backward_passes_per_step: int = 1
    average_grads_across_microbatches: bool = True
    bucket_cap_mb: float = 25
    trace_memory_usage: bool = False
    broadcast_buffers: bool = True
    gradient_as_bucket_view: bool = False

    def checked(self) -> ModelOptions:
        """Validate the options; returns them.

        Raises:
            ArgumentError: a value is invalid.
        """
        bools = {field.name: getattr(self, field.name) for field in fields(self) if field.type == "bool"}
        check_bools("smp.DistributedModel", **bools)
        if self.trace_device not in ("cpu", "gpu"):
            raise ArgumentError(f'trace_device is {self.trace_device!r}; give "cpu" or "gpu"')
        if self.trace_device == "cpu" and self.trace_execution_times:
            raise ArgumentError(
                'trace_execution_times measures the device that trains: it must be False where trace_device is "cpu"'
            )
        if type(self.backward_passes_per_step) is not int or self.backward_passes_per_step < 1:
            raise ArgumentError(f"backward_passes_per_step is {self.backward_passes_per_step!r}; give 1 or more")
        if not isinstance(self.bucket_cap_mb, (int, float)) or not self.bucket_cap_mb > 0:
            raise ArgumentError(f"bucket_cap_mb is {shown(self.bucket_cap_mb)}; give a size in MiB")
        if self.trace_device == "gpu" and not torch.cuda.is_available():
            with speaking(True):
                logger.info('trace_device is "gpu", and there is none here: the model is traced on the CPU')
        return self
