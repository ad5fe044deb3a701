"""The forms of a checkpointed module, and when it runs."""

import pytest
from torch import nn

from atorch.runtime.memory.recompute import is_recomputing

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
