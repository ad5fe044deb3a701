"""Where every fold starts: the cost of training a model plainly, all of the batch on one device."""

from __future__ import annotations

from atorch.cost.profile import ModelProfile
from atorch.cost.state import Cost


def plain_cost(profile: ModelProfile, batch_size: int | None = None) -> Cost:
    """One optimizer step of plain training on `batch_size` samples (default: as many as were traced).

    Backward multiplies every matrix twice where forward did once, for the gradients of its input and of its weight;
    frozen weights need the first alone (Kaplan et al. 2020, arXiv 2001.08361, section 2.1). Attention that does not
    keep its scores recomputes them: five products in backward for two in forward (Dao et al. 2022, arXiv 2205.14135).
    """
    samples = profile.batch_size if batch_size is None else batch_size
    scale = samples / profile.batch_size
    trainable = profile.num_trainable / profile.num_params
    in_blocks = sum(block.forward_flops for block in profile.blocks)
    forward = profile.matmul_flops + profile.attention_flops
    state_bytes = profile.trainable_bytes * profile.optim_state_per_param
    return Cost(
        num_params=float(profile.num_params),
        num_trainable=float(profile.num_trainable),
        param_bytes=float(profile.param_bytes),
        grad_bytes=float(profile.trainable_bytes),
        optim_bytes=state_bytes,
        buffer_bytes=float(profile.buffer_bytes),
        activation_bytes=scale * profile.activation_bytes,
        block_activation_bytes=scale * sum(block.activation_bytes for block in profile.blocks),
        boundary_bytes=scale * sum(block.input_bytes for block in profile.blocks),
        # Backward of the operation with the largest result: that result's gradient, and its input's.
        working_bytes=2.0 * scale * profile.working_bytes,
        block_bytes=float(max((block.param_bytes for block in profile.blocks), default=profile.param_bytes)),
        num_blocks=float(max(1, len(profile.blocks))),
        block_flop_fraction=in_blocks / forward if forward else 0.0,
        matmul_flops=scale * profile.matmul_flops * (2.0 + trainable),
        attention_flops=scale * profile.attention_flops * 3.5,
        traffic_bytes=scale * profile.traffic_bytes * 3.0,
        num_ops=profile.num_ops * 3.0,
        # Parameters, gradients and state are read; parameters and state are written.
        optim_traffic_bytes=3.0 * profile.trainable_bytes + 2.0 * state_bytes,
        batch_size=float(samples),
    )
