"""Fingerprints: texts that describe values, equal on two ranks where the values are equal.

Ranks cannot compare objects, only data that they can send. Plain values are described by kind and value: numbers,
strings, dtypes, enums, tensors, and containers, dataclasses and partials item by item. Classes are described by
qualified name, functions by that and their code. Everything else is described by its class only: an object's repr may
hold addresses, and its attributes may legitimately differ by rank. So may a function's closure and the index of a
device, which are left out.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import numbers
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from atorch.errors import shown


class Fact(NamedTuple):
    kind: str
    value: str = ""

    def __str__(self) -> str:
        """The value alone for numbers and texts, else kind and value."""
        return self.value if self.kind in (NUMBER, TEXT) else f"{self.kind} {self.value}".strip()


NUMBER, TEXT = "a number", "a text"
Facts = Mapping[str, Fact]
"""Facts of the parts of a value, by their place in it, such as `optim_args['lr']`."""

MAX_ITEMS = 1000  # the items of a container that are described
MAX_DEPTH = 8
MAX_ELEMENTS = 1_000_000  # the largest tensor whose values are described
SHOWN = 4  # the largest number of elements that are shown; more are given as a digest


def facts_of(name: str, value: Any, *, bound: bool = True) -> Facts:
    """The facts of the parts of `value`, whose places start with `name`.

    bound: include the arguments that partials bind, which may differ by rank.
    """
    return dict(_parts(name, value, 0, bound))


def structure(name: str, value: Any) -> Facts:
    """As `facts_of`, without values: tensors by dtype and number of dimensions."""
    return {place: Fact(fact.kind) for place, fact in facts_of(name, value).items()}


def facts_of_model(model: nn.Module) -> Mapping[str, Facts]:
    """Facts of a model's modules (class and mode), parameters and buffers, each in order."""
    first: dict[int, str] = {}
    parameters, buffers = {}, {}
    for index, (name, parameter) in enumerate(model.named_parameters(remove_duplicate=False)):
        tied = first.setdefault(id(parameter), name)
        also = "" if tied == name else f", is {tied!r}"
        parameters[f"parameter {index} of the model"] = Fact(f"{name!r} {_trained(parameter)}{also}")
    for index, (name, buffer) in enumerate(model.named_buffers(remove_duplicate=False)):
        buffers[f"buffer {index} of the model"] = Fact(f"{name!r} {_shape(buffer)}")
    modules = {
        f"module {name!r} of the model" if name else "the model": Fact(
            f"a {_qualified(type(module))} in {'training' if module.training else 'eval'} mode"
        )
        for name, module in model.named_modules(remove_duplicate=False)
    }
    return {"modules": modules, "parameters": parameters, "buffers": buffers}


def facts_of_call(model: nn.Module, **arguments: Any) -> Mapping[str, Facts]:
    facts = {place: fact for name, value in arguments.items() for place, fact in facts_of(name, value).items()}
    return {"arguments": facts, **facts_of_model(model)}


def facts_of_optimizer(optim: Any) -> Facts:
    """Facts of an optimizer's class and its groups' settings, which need not come from its arguments."""
    facts = dict(facts_of("the optimizer", type(optim)))
    for index, group in enumerate(getattr(optim, "param_groups", ())):
        # `fused` may differ by rank: it depends on the rank's parameters.
        settings = {name: value for name, value in group.items() if name not in ("params", "param_names", "fused")}
        facts.update(facts_of(f"the optimizer's group {index}", settings))
    return facts


def facts_of_parameters(parameters: Iterable[torch.Tensor], whose: str) -> Facts:
    """Facts of parameters in their order: shape, dtype and requires_grad."""
    return {f"parameter {index} of {whose}": Fact(_trained(parameter)) for index, parameter in enumerate(parameters)}


def facts_of_dataset(dataset: Any) -> Facts:
    """A dataset's class and length."""
    if dataset is None:
        return {"dataset": Fact("None")}
    try:
        length = f"{len(dataset)} samples"
    except Exception:  # a stream has none, and errors of a user's __len__ do not matter here
        length = "no length"
    return {"dataset": Fact(f"a {_qualified(type(dataset))} of {length}")}


def digest(facts: Facts) -> str:
    """A short text that is equal for equal facts, independent of their order."""
    return hashlib.sha256(repr(sorted(facts.items())).encode()).hexdigest()[:24]


def hash_pair(value: object) -> tuple[int, int]:
    """A hash of plain data, by its repr, and its negative: their maxima over ranks add to 0 if all hashes are equal."""
    number = int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=7).digest(), "big")
    return number, -number


def _trained(parameter: torch.Tensor) -> str:
    return f"{_shape(parameter)}, {'trains' if parameter.requires_grad else 'is frozen (requires_grad=False)'}"


def _shape(tensor: torch.Tensor) -> str:
    where = ", on the meta device" if tensor.is_meta else ""
    return f"{_sizes(tensor)} {_name(tensor.dtype)}{where}"


def _sizes(tensor: torch.Tensor) -> str:
    """A tensor's shape; of a nested one only the batch size, since torch numbers ragged sizes per process."""
    if not tensor.is_nested:
        return str(tuple(tensor.shape))
    sizes = (tensor.size(dim) if dim == 0 else "*" for dim in range(tensor.dim()))
    return f"({', '.join(map(str, sizes))})"


def _parts(name: str, value: Any, depth: int, bound: bool) -> Iterator[tuple[str, Fact]]:
    """Every part with its place; a container that holds itself ends at MAX_DEPTH."""
    inside = _items(name, value, bound) if depth < MAX_DEPTH else None
    if inside is None:
        yield name, _single(value)
        return
    for place, item in inside:
        yield from _parts(place, item, depth + 1, bound)


def _items(name: str, value: Any, bound: bool) -> list[tuple[str, Any]] | None:
    """The items of a container, one level down, with their places; None where `value` is not a container."""
    if isinstance(value, functools.partial):
        arguments = [*enumerate(value.args), *value.keywords.items()] if bound else []
        return [(name, value.func), *((f"{name}'s argument {key!r}", item) for key, item in arguments)]
    if isinstance(value, Mapping) and _is_readable(value):
        return [(f"{name}[{_key(key)}]", value[key]) for key in list(value)[:MAX_ITEMS]]
    if is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in fields(value) if field.compare and hasattr(value, field.name)]
        return [(name, type(value)), *((f"{name}.{field}", getattr(value, field)) for field in names)]
    if isinstance(value, (list, tuple)):
        return [(f"{name}[{index}]", item) for index, item in enumerate(value[:MAX_ITEMS])]
    if isinstance(value, (set, frozenset)):
        return [(f"{name}[{text}]", True) for text in sorted(map(_key, value))[:MAX_ITEMS]]
    return None


def _is_readable(value: Mapping[Any, Any]) -> bool:
    """True if reading existing keys has no side effects: a dict (defaultdict, too), but maybe not a user's class."""
    return isinstance(value, dict) or type(value).__module__ == "types"


def _key(key: Any) -> str:
    return str(_single(key))


def _single(value: Any) -> Fact:
    if value is None or isinstance(value, (bool, np.bool_)):
        return Fact(str(value))
    if isinstance(value, enum.Enum):
        return Fact(f"{_qualified(type(value))}.{value.name}")
    if isinstance(value, (str, bytes, os.PathLike)):
        return Fact(TEXT, _text(os.fspath(value)))
    if isinstance(value, (np.number, numbers.Number)):
        return Fact(NUMBER, _number(value))
    if isinstance(value, torch.Tensor):
        kind = f"a tensor of {_name(value.dtype)}, {value.dim()} dimensions"
        return Fact(kind, _values(value))
    if isinstance(value, np.ndarray):
        is_read = value.size <= MAX_ELEMENTS and not value.dtype.hasobject
        text = _hash(value.tobytes()) if is_read and value.size > SHOWN else repr(value.tolist()) if is_read else ""
        return Fact(f"an array of {value.dtype}, {value.ndim} dimensions", f"{value.shape} {text}")
    if isinstance(value, torch.device):
        return Fact(f"a {value.type} device")
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format, range, slice)):
        return Fact(repr(value))
    return Fact(_callable(value) if callable(value) else f"a {_qualified(type(value))}")


def _text(text: str | bytes) -> str:
    """A text's repr, truncated and with a digest where it is long."""
    whole = repr(text)
    return whole if len(whole) <= 200 else f"{shown(text, 200)} ({_hash(whole.encode())})"


def _number(value: Any) -> str:
    """A number's text, equal for equal numbers of different types: 1, 1.0 and numpy's."""
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, numbers.Integral):
        return repr(int(value))
    if isinstance(value, numbers.Real):
        real = float(value)
        return repr(int(real)) if real.is_integer() else repr(real)
    return repr(value)


def _values(tensor: torch.Tensor) -> str:
    """A tensor's shape, with its values or a digest of them where they can be read cheaply."""
    if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.is_meta or tensor.layout != torch.strided:
        return ""
    if tensor.is_quantized or tensor.numel() > MAX_ELEMENTS:
        return str(tuple(tensor.shape))
    values = tensor.detach().cpu().resolve_conj().resolve_neg()
    if values.numel() <= SHOWN:
        return f"{tuple(tensor.shape)} {values.tolist()}"
    return f"{tuple(tensor.shape)} {_hash(values.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _callable(value: Any) -> str:
    """A class by name, a function by name and code, a method also by its object's class, any other by its class."""
    if isinstance(value, type):
        return _qualified(value)
    if isinstance(value, MethodType):
        return f"{_callable(value.__func__)} of a {_qualified(type(value.__self__))}"
    if isinstance(value, FunctionType):
        return f"{_qualified(value)} (code {_hash(_code(value.__code__).encode())})"
    if isinstance(value, BuiltinFunctionType):
        return _qualified(value)
    return f"a {_qualified(type(value))}"


def _qualified(value: Any) -> str:
    """Module and name, without the main module, whose name differs in processes that multiprocessing started."""
    module = getattr(value, "__module__", None) or ""
    name = getattr(value, "__qualname__", type(value).__qualname__)
    return name if module in ("", "builtins", "__main__", "__mp_main__") else f"{module}.{name}"


def _code(code: CodeType) -> str:
    """A text of a function's code, independent of hash seeds, addresses and its position in its file."""
    constants = [_constant(constant) for constant in code.co_consts]
    return repr((code.co_code, code.co_names, code.co_varnames, constants))


def _constant(value: Any) -> str:
    if isinstance(value, CodeType):
        return _code(value)
    if isinstance(value, Set):
        return f"{{{', '.join(sorted(map(_constant, value)))}}}"
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return f"({', '.join(map(_constant, value))})"
    return repr(value)


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:8]
