"""Detects modules outside of blocks that do not work token by token: ranks must give them all tokens.

`token_local_modules` checks a real split. Here the same is checked on fake tensors: a module runs again on half of the
tokens. Its output must be half as long, and tensors that it makes by itself must not change.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from atorch.logs import muted
from atorch.model.position_dependence import made_alone
from atorch.model.structure import outside_of
from atorch.model.tensors import map_tensors, tensors_of
from atorch.profiler.capture.recording import Recorder


def watch_outside(recorder: Recorder, model: nn.Module, blocks: Mapping[str, nn.Module]) -> None:
    """Mark the stretches in which a module with parameters needs all tokens."""

    def look(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        stretch = recorder.stretches[-1]
        if not stretch.needs_all_tokens:
            with recorder.pausing(), torch.no_grad():
                stretch.needs_all_tokens = not _is_by_token(module, args, kwargs, output)

    for _, module in outside_of(model, blocks.keys()):
        if isinstance(next(module.parameters(), None), FakeTensor):
            module.register_forward_hook(look, with_kwargs=True)


def _is_by_token(module: nn.Module, args: Any, kwargs: Any, output: Any) -> bool:
    given = list(tensors_of((args, kwargs)))
    if len(given) != 1 or given[0].dim() < 2 or not isinstance(output, Tensor) or output.dim() < 2:
        return False
    (tensor,), sizes = given, list(output.shape)
    few = tensor.narrow(1, 0, (tensor.shape[1] + 1) // 2)
    few_args, few_kwargs = map_tensors(lambda _: few, (args, kwargs))
    _, of_all = made_alone(partial(module.forward, *args, **kwargs), given)
    try:
        with muted("torch._subclasses.fake_tensor"):
            made, of_few = made_alone(partial(module.forward, *few_args, **few_kwargs), [few])
    except (RuntimeError, ValueError, IndexError, TypeError, AssertionError):  # it accepts no other length
        return False
    sizes[1] = few.shape[1]
    return output.shape[1] == tensor.shape[1] and list(made.shape) == sizes and of_few == of_all
