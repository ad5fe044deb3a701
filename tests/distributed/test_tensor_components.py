"""Whatever a tensor is made of, its parts hold its values."""

from collections.abc import Callable

import pytest
import torch

from atorch.model.pytree import dense_parts, is_dense, same_values

KINDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "plain": lambda values: values,
    "coo": torch.Tensor.to_sparse,
    "csr": torch.Tensor.to_sparse_csr,
    "csc": torch.Tensor.to_sparse_csc,
    "strided rows": lambda values: torch.nested.nested_tensor([values, values[:1]]),
    "jagged rows": lambda values: torch.nested.nested_tensor([values, values[:1]], layout=torch.jagged),
}


@pytest.mark.filterwarnings("ignore:.*(beta state|prototype)")
@pytest.mark.parametrize("kind", KINDS)
def test_parts_hold_the_values(kind: str) -> None:
    tensor, other = KINDS[kind](torch.eye(3)), KINDS[kind](2 * torch.eye(3))
    assert not same_values(tensor, other)
    for part, values in zip(dense_parts(tensor), dense_parts(other), strict=True):
        part.copy_(values)
    assert same_values(tensor, other)
    assert same_values(tensor, tensor.clone())
    assert is_dense(tensor) == (kind == "plain")
