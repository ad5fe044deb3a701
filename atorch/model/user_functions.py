"""Functions that users pass: their types, and calls of model and loss whose errors name the argument at fault."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop

from atorch.errors import ArgumentError, ContradictionError, shown

LossFunc = Callable[[Any, Any], Any]
"""(batch, output) → a scalar loss, or a sequence whose first item is one."""
MakeOptimizer = Callable[[Any], Optimizer]
"""Parameters or parameter groups → optimizer."""
InputFormat = Literal["unpack_sequence", "unpack_dict"]

_FORMS: Mapping[str | None, str] = {
    None: "model(batch)",
    "unpack_sequence": "model(*batch)",
    "unpack_dict": "model(**batch)",
}


def calling(form: InputFormat | None) -> Callable[[nn.Module, Any], Any]:
    """A function that calls a model with a batch in the form of `model_input_format`.

    Raises:
        ArgumentError: batch and form do not match; the message names the form to give, the cause is the model's error.
    """

    def call(model: nn.Module, batch: Any) -> Any:
        is_sequence = isinstance(batch, Iterable) and not isinstance(batch, Mapping)
        if not {"unpack_dict": hasattr(batch, "keys"), "unpack_sequence": is_sequence}.get(str(form), True):
            raise ContradictionError(_misfit(model, batch, form))
        args, kwargs = _unpacked(batch, form)
        try:
            return model(*args, **kwargs)
        except (TypeError, AttributeError) as error:
            is_taken_whole = form is None and not isinstance(batch, torch.Tensor)
            is_of_batch = is_taken_whole and re.search(rf"\b{re.escape(type(batch).__name__)}\b", str(error))
            if not is_of_batch and _takes(model, batch, form):
                raise
            message = f"{_misfit(model, batch, form)}. The call raised {type(error).__name__}: {error}"
            raise ArgumentError(message) from error

    return call


def _unpacked(batch: Any, form: str | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if form == "unpack_dict":
        return (), {name: batch[name] for name in batch.keys()}  # noqa: SIM118  (iterating a batch need not give keys)
    return (tuple(batch), {}) if form == "unpack_sequence" else ((batch,), {})


def _takes(model: nn.Module, batch: Any, form: str | None) -> bool:
    """True if the signature of the model's forward accepts the parts of the batch."""
    args, kwargs = _unpacked(batch, form)
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError:
        return False
    except ValueError:  # it has no signature
        return True
    return True


def _misfit(model: nn.Module, batch: Any, form: str | None) -> str:
    """The error message with the format, the kind of batch, and the remedy."""
    kind, fitting = type(batch).__name__, None
    if isinstance(batch, Mapping):
        kind, fitting = f"{kind} of {shown(list(batch))}", "unpack_dict"
    elif isinstance(batch, (list, tuple)):
        parts = ", ".join(type(part).__name__ for part in batch[:6])
        kind, fitting = f"{kind} of {len(batch)} ({parts})", "unpack_sequence"
    give = ["let it take all that the batch has, targets too", "let the dataset, or prepare_input, give what it takes"]
    if fitting != form and _takes(model, batch, fitting):
        give = [f"give {fitting!r} for {_FORMS[fitting]}"]
    elif form is not None and _takes(model, batch, None):
        give.insert(0, "give None for model(batch) if it takes all of it as one")
    try:
        taken = f"({', '.join(inspect.signature(model.forward).parameters)})"
    except (TypeError, ValueError):
        taken = "what it takes"
    return (
        f"model_input_format is {form!r}, so that the model is called as {_FORMS[form]}; the batch is a {kind}, and "
        f"{type(model).__name__}.forward takes {taken}: {', or '.join(give)}"
    )


# Not RuntimeError: memory may have run out, or a collective failed, and another call would issue more of them.
_OF_WRONG_TYPES = (TypeError, AttributeError, KeyError, IndexError)


def scalar_loss(loss_func: LossFunc) -> LossFunc:
    """`loss_func`; its first result that is not a scalar raises there instead of later in backward.

    Raises:
        ContradictionError: the loss is not a scalar, or the function takes (output, batch).
    """

    has_worked = False

    @functools.wraps(loss_func)
    def checked(batch: Any, output: Any) -> Any:
        nonlocal has_worked
        try:
            loss = loss_func(batch, output)
        except _OF_WRONG_TYPES as error:
            if not has_worked and _is_swapped(loss_func, batch, output):
                raise ContradictionError(
                    f"loss_func(batch, output) raised {type(error).__name__}: {error}. With its arguments swapped it "
                    "returns a loss: let it take (batch, output)"
                ) from error
            raise
        if not _is_scalar(loss):
            value = value_of(loss)
            what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
            raise ContradictionError(
                f"loss_func returned {what}; it returns a scalar tensor, or a list or tuple with one first. "
                "Reduce it, e.g. with .mean()"
            )
        has_worked = True
        return loss

    return checked


def _is_scalar(loss: Any) -> bool:
    value = value_of(loss)
    return isinstance(value, torch.Tensor) and value.dim() == 0


def _is_swapped(loss_func: LossFunc, batch: Any, output: Any) -> bool:
    """True if `loss_func` gives a scalar for (output, batch)."""
    try:
        with torch.no_grad():
            return _is_scalar(loss_func(output, batch))
    except (*_OF_WRONG_TYPES, ValueError, RuntimeError):
        return False


ELEMENTWISE = (ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop)


def is_elementwise(optimizer: Any) -> bool:
    """True for exact classes of torch in `ELEMENTWISE`; subclasses may override the step."""
    return type(optimizer) in ELEMENTWISE


def value_of(loss: Any) -> torch.Tensor:
    value: torch.Tensor = loss[0] if isinstance(loss, (list, tuple)) and loss else loss
    return value


def with_value(loss: Any, value: torch.Tensor) -> Any:
    """`loss` with `value` as its scalar, in the same structure."""
    if not isinstance(loss, (list, tuple)):
        return value
    items = (value, *loss[1:])
    return type(loss)(*items) if hasattr(loss, "_fields") else type(loss)(items)
