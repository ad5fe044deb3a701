"""Dependence of a record on its tokens: extrapolation to long samples, and modules that need all tokens.

The unfused substitute of a scan kernel loops over tokens, and takes minutes at full length. A block calls the same
operations at any length, and their reads, writes and FLOPs are at most quadratic in the tokens. So three short samples
determine them, and a fourth checks the fit. Loops over chunks are fast enough at full length.

Ranks must give all tokens to modules outside of blocks that do not work token by token. `token_split` checks a
real split. Here the same is checked on fake tensors: a module runs again on half of the tokens. Its output must be half
as long, and tensors that it makes by itself must not change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from atorch.logs import muted
from atorch.model.pytree import map_tensors, tensors_in
from atorch.model.structure import made_alone, outside_of
from atorch.profiler.recording import Recorder, Stretch

TIMES = (1, 2, 3)
CHECK = 5
UNIT = 4  # tokens
_TOLERANCE = 0.01
_FIGURES = (
    *("moved_bytes", "working_bytes", "data_bytes", "flops", "head_dim", "batch", "count"),
    *("rows", "inner", "columns", "elements", "left"),
)


def extrapolated(record: Callable[[int], Recorder], length: int) -> Recorder | None:
    """The record of a sample of `length` tokens; None if it has no loop over tokens, or short samples do not fit.

    Args:
        record: records a sample of a given number of tokens.
    """
    short: list[Recorder] = []
    for times in (*TIMES, CHECK):
        short.append(record(times * UNIT))
        if len(short) > 1 and _num_calls(short[-1]) == _num_calls(short[-2]):
            return None
    check = short.pop()
    if not _is_alike([*short, check]):
        return None
    recorded = [_get(slot) for slot in _slots(check)]
    extrapolated = [value for _, value in _extrapolated(short, CHECK)]
    if any(abs(one - two) > _TOLERANCE * two for one, two in zip(extrapolated, recorded, strict=True)):
        return None
    return at_length(short, length)


def at_length(short: Sequence[Recorder], length: int) -> Recorder:
    """The last of the records of TIMES units of tokens, updated to the figures of `length` tokens."""
    for (home, name), value in list(_extrapolated(short, length / UNIT)):
        if isinstance(home, dict):
            home[name] = value
        else:
            setattr(home, name, value)
    return short[-1]


def _extrapolated(short: Sequence[Recorder], times: float) -> Iterator[tuple[tuple[Any, Any], float]]:
    """Each figure's place in the last record, and its value at `times` units on a parabola (Lagrange's formula)."""
    weights = ((times - 2) * (times - 3) / 2, -(times - 1) * (times - 3), (times - 1) * (times - 2) / 2)
    for slots in zip(*map(_slots, short), strict=True):
        values = [_get(slot) for slot in slots]
        extrapolated = sum(weight * value for weight, value in zip(weights, values, strict=True))
        yield slots[-1], round(extrapolated) if isinstance(values[-1], int) else extrapolated


def _num_calls(recorder: Recorder) -> int:
    return sum(stretch.num_calls for stretch in recorder.stretches)


def _slots(recorder: Recorder) -> Iterator[tuple[Any, Any]]:
    """The places of a record's figures, each as an object or a dict, and the name in it."""
    for stretch in recorder.stretches:
        yield stretch, "seq_len"
        for sizes in (stretch.saved, stretch.inputs, stretch.read):
            yield from ((sizes, value) for value in sizes)
        for operation in stretch.operations:
            yield from ((operation, name) for name in _FIGURES)


def _get(slot: tuple[Any, Any]) -> float:
    home, name = slot
    figure: float = home[name] if isinstance(home, dict) else getattr(home, name)
    return figure


def _is_alike(recorders: Sequence[Recorder]) -> bool:
    """True if the same operations ran, on equal numbers of values."""
    first, *others = (list(map(_outline, recorder.stretches)) for recorder in recorders)
    return all(other == first for other in others)


def _outline(run: Stretch) -> tuple[Any, ...]:
    """The parts of a stretch that do not depend on the number of tokens."""
    return run.block, len(run.saved), len(run.inputs), len(run.read), [call.kind for call in run.operations]


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
    """True if half of the tokens, along the second dim, give half of the output."""
    tensors = tensors_in((args, kwargs))
    if len(tensors) != 1 or tensors[0].dim() < 2 or not isinstance(output, Tensor) or output.dim() < 2:
        return False
    (tensor,), sizes = tensors, list(output.shape)
    few = tensor.narrow(1, 0, (tensor.shape[1] + 1) // 2)
    few_args, few_kwargs = map_tensors(lambda _: few, (args, kwargs))
    _, of_all = made_alone(partial(module.forward, *args, **kwargs), tensors)
    try:
        with muted("torch._subclasses.fake_tensor"):
            made, of_few = made_alone(partial(module.forward, *few_args, **few_kwargs), [few])
    except (RuntimeError, ValueError, IndexError, TypeError, AssertionError):  # it accepts no other length
        return False
    sizes[1] = few.shape[1]
    return output.shape[1] == tensor.shape[1] and list(made.shape) == sizes and of_few == of_all
