"""Where every fold starts."""

from dataclasses import replace

import pytest

from atorch.cost import ModelProfile, Segment, plain_cost

PROFILE = ModelProfile(
    segments=(Segment(name="", num_params=10, num_trainable=5),), batch_size=2, num_params=10, num_trainable=5,
    param_bytes=40, trainable_bytes=20, buffer_bytes=3, optim_state_per_param=2.0,
)  # fmt: skip


def test_bytes_an_element_are_the_models() -> None:
    cost = plain_cost(PROFILE)
    assert (cost.param_itemsize, cost.grad_itemsize, cost.optim_itemsize, cost.buffer_bytes) == (4, 4, 8, 3)
    assert (cost.traced_batch, cost.batch_size) == (2, 2)
    assert plain_cost(PROFILE, 6).batch_size == 6


@pytest.mark.parametrize(("param_bytes", "dtype"), [(40, "float32"), (20, "bfloat16"), (30, "float32")])
def test_a_model_in_16_bits_multiplies_in_16_bits(param_bytes: int, dtype: str) -> None:
    assert plain_cost(replace(PROFILE, param_bytes=param_bytes)).dtype == dtype


def test_a_model_with_nothing_to_train() -> None:
    frozen = replace(PROFILE, num_trainable=0, trainable_bytes=0)
    assert plain_cost(frozen).grad_itemsize == 4
