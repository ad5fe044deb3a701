"""The forms of a checkpointed module, what autograd keeps of it, and when it runs."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from atorch.runtime.memory.recompute import (
    is_recomputing,
)

FORMS = {
    "plain": {},
    "offload": {"offload_to_cpu": True},
    "counter": {"maintain_forward_counter": True},
    "reentrant": {"reentrant": True},
    "reentrant-offload": {"reentrant": True, "offload_to_cpu": True},
    "selective": {"selective": True},
    "selective-counter": {"selective": True, "maintain_forward_counter": True},
}


every_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


def calls_of(module: nn.Module) -> list[bool]:
    """A list that gets `is_recomputing()` of every call of `module` from now on."""
    seen: list[bool] = []
    module.register_forward_pre_hook(lambda *_: seen.append(is_recomputing()))
    return seen


@contextmanager
def saved_bytes() -> Iterator[list[int]]:
    """The bytes that autograd keeps for backward, each storage once, in a list of one number."""
    sizes: dict[int, int] = {}
    total: list[int] = []

    @torch.compiler.disable
    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        yield total
    total.append(sum(sizes.values()))
