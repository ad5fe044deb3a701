"""The cost that strategies start from: plain training with the whole batch on one device."""

from __future__ import annotations

import math

from atorch.cost.profile import ModelProfile
from atorch.cost.state import Cost


def plain_cost(profile: ModelProfile, batch_size: int | None = None, device_bytes: float = math.inf) -> Cost:
    """One optimizer step of plain training on `batch_size` samples (default: as many as were traced).

    `device_bytes` is the memory of a device, if known.

    A model in 16 bits multiplies in 16 bits, even if adapters of its frozen weights are in fp32. The cost uses bfloat16
    for both 16-bit dtypes, which run at the same speed.
    """
    mean = profile.param_bytes / profile.num_params
    grad_itemsize = profile.trainable_bytes / profile.num_trainable if profile.num_trainable else mean
    # Segments with a frozen_itemsize carry their own; the trainable parameters then have the gradients' itemsize.
    itemsize = grad_itemsize if any(segment.frozen_itemsize for segment in profile.segments) else mean
    return Cost(
        segments=profile.segments,
        in_half=profile.in_half,
        in_autocast=profile.in_autocast,
        traced_batch=float(profile.batch_size),
        batch_size=float(profile.batch_size if batch_size is None else batch_size),
        buffer_bytes=float(profile.buffer_bytes),
        device_bytes=float(device_bytes),
        param_itemsize=itemsize,
        grad_itemsize=grad_itemsize,
        optim_itemsize=grad_itemsize * profile.optim_state_per_param,
        optim_is_elementwise=profile.optim_is_elementwise,
        # Multi-tensor Adam, as torch steps on GPUs, holds the roots of all second moments at once.
        step_itemsize=grad_itemsize if profile.optim_state_per_param >= 2.0 and profile.optim_temporaries else 0.0,
        optim_traffic=profile.optim_traffic,
        num_counts=profile.num_counts,
        attention=profile.attention,
        dtype="bfloat16" if mean < 3.0 else "float32",
    )
