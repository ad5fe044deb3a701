"""A model's list of repeated blocks, and the check that a trace of a few blocks represents all of them.

A few blocks represent all if the blocks are alike, and if the model treats each like the one before. So it calls each
once, in order, with inputs of the same shapes, under the same contexts, with the same operations between. The first
condition is read from the blocks. The second is checked in a forward pass of full depth, in which blocks beyond the
first few only return what the one before returned.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from atorch.model.copy import Convert, copy_with
from atorch.model.pytree import map_tensors, tensors_in
from atorch.model.structure import repeated_blocks, set_depth
from atorch.profiler.repeated_blocks import are_alike, described, groups_of_alike, like
from atorch.runtime.chunk.pass_schedule import ENDS, FEWEST

_PERIODS = 8  # blocks of the longest period
_LOOKED_AT = 4 * _PERIODS  # blocks in which a period is searched
_DETACHING = frozenset({torch.ops.aten.detach.default, torch.ops.aten.alias.default})


class Stack(NamedTuple):
    """A list of blocks that repeat with a period, from one of the first on."""

    name: str
    blocks: Sequence[nn.Module]
    first: int
    """Number of blocks before those that repeat."""
    period: int
    """Number of blocks that repeat together."""

    @property
    def depths(self) -> tuple[int, int, int]:
        """Numbers of blocks of the three shallow copies that are traced."""
        least = self.first + FEWEST * self.period
        least += (len(self.blocks) - least) % self.period
        return least, least + self.period, least + 2 * self.period

    def place(self, name: str) -> tuple[int, str] | None:
        """The index of a parameter's block, and its name inside; None if it is in no repeating block."""
        index, _, rest = name.removeprefix(f"{self.name}.").partition(".")
        if not name.startswith(f"{self.name}.") or not index.isdigit() or int(index) < self.first:
            return None
        return int(index), rest

    def period_of(self, name: str) -> int | None:
        """The number of a parameter's period; None if it is in no repeating block."""
        place = self.place(name)
        return None if place is None else (place[0] - self.first) // self.period

    def later(self, name: str, periods: int) -> str:
        """A parameter's name, `periods` periods later if it is in a repeating block."""
        place = self.place(name)
        return name if place is None else f"{self.name}.{place[0] + periods * self.period}.{place[1]}"


def stack_of(model: nn.Module, compiled: Collection[str]) -> Stack | None:
    """The longest list of a model's blocks, if they repeat, share nothing, and fewer of them save work; else None."""
    by_list: dict[str, list[nn.Module]] = {}
    for name, block in repeated_blocks(model).items():
        by_list.setdefault(name.rpartition(".")[0], []).append(block)
    if not by_list:
        return None
    name = max(by_list, key=lambda path: len(by_list[path]))
    blocks, container = by_list[name], model.get_submodule(name)
    if not isinstance(container, (nn.ModuleList, nn.Sequential)) or list(container) != blocks or not name:
        return None
    names_of = Counter(parameter for _, parameter in model.named_parameters(remove_duplicate=False))
    of_blocks = [parameter for block in blocks for parameter in block.parameters()]
    if any(names_of[parameter] > 1 for parameter in of_blocks):
        return None  # blocks that share parameters, or are the same module
    run_at_least = 4 * (len(names_of) - len(of_blocks)) + 5 * FEWEST * len(of_blocks) // len(blocks)
    if 4 * run_at_least > 3 * len(of_blocks):
        return None
    repeats = _find_period(blocks, [_compiled_in(f"{name}.{index}.", compiled) for index in range(len(blocks))])
    stack = None if repeats is None else Stack(name, blocks, *repeats)
    return stack if stack is not None and 2 * sum(stack.depths) <= len(blocks) else None


def _compiled_in(prefix: str, compiled: Collection[str]) -> frozenset[str]:
    return frozenset(f"{name}."[len(prefix) :] for name in compiled if f"{name}.".startswith(prefix))


def _find_period(blocks: Sequence[nn.Module], compiled: Sequence[frozenset[str]]) -> tuple[int, int] | None:
    """(number of blocks before those that repeat, their period), or None if they do not repeat."""
    some = {str(index): block for index, block in enumerate(blocks[:_LOOKED_AT])}
    group_of = {int(name): number for number, group in enumerate(groups_of_alike(some)) for name in group}
    labels = [(group_of[index], compiled[index]) for index in range(len(some))]
    for period in range(1, _PERIODS + 1):
        differing = [index for index in range(len(labels) - period) if labels[index] != labels[index + period]]
        first = max(differing, default=-1) + 1
        if first <= _PERIODS and first + 2 * period <= len(labels):
            break
    else:
        return None
    for index in range(len(labels), len(blocks)):
        before = first + (index - first) % period
        if compiled[index] != compiled[before] or not are_alike(blocks[before], blocks[index], index - before):
            return None
    return first, period


class LayerTrace(TorchDispatchMode):
    """Records a forward pass of a copy: the calls of blocks, the operations between, and uses of counting numbers.

    A block's number, such as a layer index, may change its behaviour from some number on. If all comparisons of numbers
    come out alike for some blocks, relative to their own numbers, all blocks are assumed to behave alike.
    `len(cache) <= index` is always at the same distance from the index, `index < 12` is not.
    """

    def __init__(self, stack: Stack, depth: int, device_type: str, *, is_whole: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._stack, self.depth, self._device_type, self._is_whole = stack, depth, device_type, is_whole
        self.calls: list[tuple[int, Hashable]] = []
        self.after: Sequence[Any] | None = None
        """Operations since the beginning of the last call, once the forward pass is over."""
        self._noted: list[Any] = []
        self._is_inside = False
        self._num_modes: tuple[int, int] | None = None
        self._runs: dict[int, tuple[list[Tensor], Any, list[Any]]] = {}  # inputs, output, uses of numbers

    def copy_with(self, model: nn.Module, functions: Iterable[Any], convert: Convert) -> tuple[nn.Module, list[Any]]:
        """A copy whose calls are recorded, as from `copy.copy_with`.

        It has the first `depth` blocks. If it `is_whole`, it also has the others, which share these blocks' parts, and
        return the output of the block a period before.
        """
        blocks, depth, period = self._stack.blocks, self.depth, self._stack.period
        if self._is_whole:
            alike = [blocks[index::period] for index in range(depth - period, depth)]
            copied, others = copy_with(model, functions, convert, alike)
        else:
            copied, others = copy_with(model, functions, convert, without=blocks[depth:])
            set_depth(copied, len(blocks), depth)
        container: Any = copied.get_submodule(self._stack.name)
        for index in range(len(blocks)):
            block = container._modules[str(index)]
            if block is None:
                del container._modules[str(index)]
                continue
            if index >= self._stack.first + period:
                self._count(index, [block] if index >= depth else block.modules())
            block.forward = self._watched(index, block.forward)
        return copied, others

    def is_continued(self, whole: LayerTrace) -> bool:
        """True if `whole`, of full depth, continues this pass with further blocks treated alike."""
        period, begun = self._stack.period, self.depth - ENDS * self._stack.period
        pairs = zip(whole.calls[begun:], whole.calls[begun - period :], strict=False)
        return (
            [index for index, _ in whole.calls] == list(range(len(self._stack.blocks)))
            and self.calls == whole.calls[: self.depth]
            and self.after == whole.after
            and all(how == before for (_, how), (_, before) in pairs)
        )

    def __exit__(self, *fault: Any) -> None:
        super().__exit__(*fault)  # type: ignore[no-untyped-call]
        self.after = tuple(self._noted)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_noted = not self._is_inside and func.namespace != "prim"
        if is_noted and func not in _DETACHING:  # which autograd also runs when it saves tensors
            self._noted.append(func)
        return func(*args, **(kwargs or {}))

    def _count(self, index: int, modules: Iterable[nn.Module]) -> None:
        """Let integers of a block that differ from those of the block a period before record their uses."""
        block, before = self._stack.blocks[index], self._stack.blocks[index - self._stack.period]
        for module, current, earlier in zip(modules, block.modules(), before.modules(), strict=False):
            for name, value in vars(current).items():
                if type(value) is int and value != vars(earlier)[name]:
                    vars(module)[name] = _Counting(value, lambda *use: self._noted.append(use))

    def _watched(self, index: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            if self._is_inside or self.after is not None:  # recompute in backward is not a call
                return forward(*args, **kwargs)
            self._note(index, (args, kwargs))
            inputs = tensors_in((args, kwargs))
            self._is_inside = True
            try:
                output = forward(*args, **kwargs) if index < self.depth else self._repeated(index, inputs)
            finally:
                self._is_inside = False
            if self._is_whole:  # else kept tensors would count as live
                self._runs[index] = inputs, output, list(self._noted)
            return output

        return watched

    def _repeated(self, index: int, inputs: Sequence[Tensor]) -> Any:
        """The output and the noted uses of the block a period before, on these inputs."""
        before, output, self._noted[:] = self._runs[index - self._stack.period]
        now = {id(one): other for one, other in zip(before, inputs, strict=True)}  # for outputs that are inputs
        return map_tensors(lambda tensor: now[id(tensor)] if id(tensor) in now else like(tensor), output)

    def _note(self, index: int, arguments: Any) -> None:
        operations, self._noted = tuple(self._noted), []
        numbers: dict[int, int] = {}  # numbers of tensors, by which equal ones show
        made_of = described(arguments, lambda tensor: numbers.setdefault(id(tensor), len(numbers)), type)
        self.calls.append((index, (*self._context(), *made_of, operations)))

    def _context(self) -> tuple[Hashable, ...]:
        """The modes and hooks in force around a block, relative to the first block."""
        modes = torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()
        self._num_modes = self._num_modes or modes
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        return (
            tuple(now - first for now, first in zip(modes, self._num_modes, strict=True)),
            None if hooks is None else hooks[0].__qualname__,
            torch.is_grad_enabled(),
            torch.is_autocast_enabled(self._device_type) and torch.get_autocast_dtype(self._device_type),
        )


class _Counting(int):
    """An integer that reports its uses."""

    report: Callable[..., None]

    def __new__(cls, value: int, report: Callable[..., None]) -> _Counting:
        made = super().__new__(cls, value)
        made.report = report
        return made


_COMPARISONS = ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__")
_SHIFTS = ("__add__", "__radd__", "__sub__")
_OTHERS = (
    *("__mod__", "__floordiv__", "__divmod__", "__and__", "__or__", "__xor__", "__rshift__", "__rsub__", "__rmod__"),
    *("__bool__", "__hash__", "__str__", "__repr__", "__format__"),
)


def _reporting(name: str) -> Callable[..., Any]:
    def run(self: _Counting, *others: Any) -> Any:
        result = getattr(int, name)(self, *others)
        if name in _SHIFTS:
            return _Counting(result, self.report) if type(result) is int else result
        if name in _COMPARISONS:
            self.report(name, int(self) - int(others[0]) if isinstance(others[0], int) else type(others[0]))
        else:
            self.report(name, int(self), *others)
        return result

    return run


for _name in (*_COMPARISONS, *_SHIFTS, *_OTHERS):
    setattr(_Counting, _name, _reporting(_name))
