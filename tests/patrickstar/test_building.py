"""What `model_func` may return."""

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from atorch.errors import ArgumentError
from atorch.patrickstar.runtime import built


def test_copies_are_new() -> None:
    layer = nn.Linear(2, 2)
    assert built(lambda: nn.Sequential(copy.deepcopy(layer), copy.deepcopy(layer)))[0] is not layer


def test_parts_without_parameters_may_be_older() -> None:
    relu = nn.ReLU()
    assert built(lambda: nn.Sequential(nn.Linear(2, 2), relu))[1] is relu


def test_what_was_frozen_is_as_old_and_what_freezes_is_new() -> None:
    """As before workers of a loader are forked."""
    old = nn.Linear(2, 2)
    gc.freeze()
    with pytest.raises(ArgumentError, match="a Linear, and it was made before"):
        built(lambda: old)
    assert built(lambda: nn.Linear(2, 2)).weight.shape == (2, 2)

    def freezing() -> nn.Module:
        made = nn.Linear(2, 2)
        gc.freeze()
        return made

    assert built(freezing).weight.shape == (2, 2)


OLD = nn.Sequential(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("model_func", "told"),
    [
        (OLD, "model_func is a module, Sequential; give the function"),
        (lambda: OLD, r"its part '0' was made before model_func was called; make all of the model inside"),
        (lambda: OLD[0], "a Linear, and it was made before"),
        (lambda: nn.Sequential(nn.Linear(2, 2), OLD), r"its part '1\.0' was made before"),
        (lambda: None, "model_func returned None; return the model"),
        ("model", "model_func is 'model'; give a function"),
    ],
)
def test_what_is_no_new_model_is_told(model_func: Callable[[], Any], told: str) -> None:
    with pytest.raises(ArgumentError, match=told):
        built(model_func)
