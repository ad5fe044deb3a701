"""A stage of a pipeline: the whole model, of which only the stage's own units hold parameters and run.

A stage runs the model's own forward, so masks, positions and other code between units work as usual. Units of other
stages are hollow: the module and its attributes stay, but placeholders replace its parameters. Calling one returns the
tensors that an earlier stage sent, or zeros of the right shape for tensors that this stage does not need. The forward
ends at the first call of a later stage, and the stage sends the tensors that are needed there.

Each stage that calls a unit holds it, as it does a parameter outside of units that it needs. The gradients of those
that several stages hold are summed (`stage_placement`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from atorch.errors import StrategyError
from atorch.model.copy import duplicate
from atorch.model.pytree import map_leaves, tensors_in
from atorch.model.state import preserved_state
from atorch.model.structure import parameter_names
from atorch.model.wrapper import override, override_forward
from atorch.runtime.data_parallel.gradient_sync import GradientSync
from atorch.runtime.pipeline.capture.stage_dataflow import CallOutput, OutputIndex, Route
from atorch.runtime.pipeline.placeholders import Placeholder, TensorSpec, need_values, shape_of

STAGE = "_atorch_stage"
"""The attribute of units with their stage and their name; on a stage's model the name is empty."""


@dataclass(eq=False)
class ModelStage:
    """The calls from `start` to before `stop`, and the tensors that cross before and after them."""

    route: Route
    index: int
    start: int
    stop: int
    num_stages: int
    device: torch.device
    current: _Visit | None = field(default=None, init=False)

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.num_stages - 1

    @functools.cached_property
    def incoming(self) -> tuple[CallOutput, ...]:
        """Values that this stage receives."""
        return self.route.wires(self.start)

    @functools.cached_property
    def outgoing(self) -> tuple[CallOutput, ...]:
        """Values that this stage sends, the next one's `incoming`."""
        return () if self.is_last else self.route.wires(self.stop)

    def passes_by(self) -> bool:
        """True while the model's code between units runs, of which a stage needs only part of the results."""
        return self.current is not None and self.current.passes_by

    @contextmanager
    def visit(self, wires: Sequence[Tensor], shapes: Sequence[Sequence[TensorSpec]]) -> Iterator[_Visit]:
        """Make calls of the stage's model run it on `wires` inside; `shapes` are those of all earlier calls."""
        visit = _Visit(self, dict(zip(self.incoming, wires, strict=True)), shapes)
        self.current = visit
        try:
            yield visit
        finally:
            self.current = None


@dataclass(eq=False)
class _Visit:
    stage: ModelStage
    values: dict[CallOutput, Tensor]
    shapes: Sequence[Sequence[TensorSpec]]
    made: list[list[TensorSpec]] = field(default_factory=list)  # shapes that the stage's own calls returned
    count: int = 0
    passes_by: bool = False  # the model's code between units runs

    def call(self, name: str, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        stage, number = self.stage, self.count
        calls = stage.route.calls
        self.count += 1
        if number == len(calls) or calls[number].unit != name:
            expected = f"{calls[number].unit} was" if number < len(calls) else "nothing more was"
            raise StrategyError(
                f"the model calls {name} where on the sample batch {expected} called; a pipeline runs models that call "
                "the same modules in the same order for every batch"
            )
        if number >= stage.stop:
            raise _Done
        if number < stage.start:
            return self._sent(number)
        need_values((args, kwargs))
        self.passes_by = False
        output = run(*args, **kwargs)
        self._keep(number, output)
        self.passes_by = True
        return output

    def _sent(self, number: int) -> Any:
        sent: dict[OutputIndex, Tensor] = {}  # a tensor that is returned in two places arrives as one

        def fill(leaf: Any, place: str) -> Any:
            if not isinstance(leaf, OutputIndex):
                return leaf
            if leaf not in sent:
                value = CallOutput(number, leaf)
                tensor = self.values.get(value)
                if tensor is None:
                    tensor = self.shapes[number][leaf].zeros(self.stage.device)
                sent[leaf] = self._own(value, tensor)
            return sent[leaf]

        return map_leaves(fill, self.stage.route.calls[number].returns)

    def _keep(self, number: int, output: Any) -> None:
        tensors = tensors_in(output)
        for place, tensor in enumerate(tensors):
            value = CallOutput(number, place)
            if value in self.stage.outgoing:
                self.values[value] = self._own(value, tensor)
        shapes = [shape_of(tensor) for tensor in tensors]
        call = self.stage.route.calls[number]
        if len(shapes) != call.num_tensors:
            raise StrategyError(
                f"{call.unit} returns {len(shapes)} tensors, and on the sample batch it returned {call.num_tensors}; a "
                "pipeline runs models that pass on the same for every batch"
            )
        self.made.append(shapes)

    def _own(self, value: CallOutput, tensor: Tensor) -> Tensor:
        """`tensor`, or a copy if the model writes to it later: the next stage repeats that write."""
        return tensor.clone() if value in self.stage.route.written else tensor


class _Done(BaseException):
    """Ends a model's forward where a later stage goes on; a BaseException, so that handlers in models miss it."""


def cut(
    model: nn.Module,
    units: Mapping[str, nn.Module],
    route: Route,
    starts: Sequence[int],
    mine: Sequence[int],
    device: torch.device,
    *,
    shares: bool = False,
) -> tuple[nn.Module, ...]:
    """The stages `mine` of the model, cut before the calls `starts`: each a module that is called like the model.

    The first is `model` itself, in place; others are copies of its structure. Frees the parameters of all other
    stages. `stage_of` returns the stage of a module.

    shares: stages that hold the same parameter share it, instead of a copy in each.
    """
    keeping = _keeping(model, units, route, starts)
    ends = (*starts[1:], len(route.calls))
    held = [keeping[index] for index in mine]
    before = [set[str]() if shares else set[str]().union(*held[:place]) for place in range(len(mine))]
    parts = [model, *(_structure(model, before[place], held[place]) for place in range(1, len(mine)))]
    for index, part in zip(mine, parts, strict=True):
        stage = ModelStage(route, index, starts[index], ends[index], len(starts), device)
        _hollow(part, keeping[index], stage)
        for name in units:
            unit = part.get_submodule(name)
            vars(unit)[STAGE] = (stage, name)
            override(unit, "__call__", _through_stage)
        vars(part)[STAGE] = (stage, "")
        override_forward(part, _until_done)
    return tuple(parts)


def stage_of(part: nn.Module) -> ModelStage:
    """The stage of a module made by `cut`, also through wrappers that forward attributes."""
    return getattr(part, STAGE)[0]  # type: ignore[no-any-return]


def holders(
    model: nn.Module, units: Mapping[str, nn.Module], route: Route, starts: Sequence[int]
) -> list[tuple[tuple[str, ...], tuple[int, ...]]]:
    """The parameters that several stages hold: all names of each, and the stages, in ascending order."""
    keeping = _keeping(model, units, route, starts)
    shared = []
    for aliases in parameter_names(model).values():
        stages = tuple(index for index, kept in enumerate(keeping) if not kept.isdisjoint(aliases))
        if len(stages) > 1:
            shared.append((tuple(aliases), stages))
    return shared


def held_for_loss(model: nn.Module, units: Mapping[str, nn.Module], route: Route, starts: Sequence[int]) -> list[str]:
    """Names of the parameters that the last stage holds only because the loss function reads them."""
    unread = replace(route, read_by_loss=frozenset())
    held, needed = (_keeping(model, units, variant, starts)[-1] for variant in (route, unread))
    return [name for name, _ in model.named_parameters() if name in held and name not in needed]


def _keeping(model: nn.Module, units: Mapping[str, nn.Module], route: Route, starts: Sequence[int]) -> list[set[str]]:
    """Names of each stage's parameters and buffers, under all their names in the stage's modules.

    The first stage takes those that no call needs; every stage has the buffers outside of units.
    """
    inside = {name: _names_inside(model, unit) for name, unit in units.items()}
    everywhere = dict(model.named_parameters(remove_duplicate=False)) | dict(
        model.named_buffers(remove_duplicate=False)
    )
    aliases: dict[int, set[str]] = {}
    for name, tensor in everywhere.items():
        aliases.setdefault(id(tensor), set()).add(name)
    ends = (*starts[1:], len(route.calls))
    keeping: list[set[str]] = []
    for start, stop in zip(starts, ends, strict=True):
        kept = set().union(*(inside[call.unit] for call in route.calls[start:stop]))
        for name in route.parameters(start, stop):
            kept |= aliases[id(everywhere[name])]
        keeping.append(kept)
    keeping[0] |= set(everywhere).difference(*keeping)
    in_units = set().union(*inside.values())
    common = {name for name, _ in model.named_buffers(remove_duplicate=False)} - in_units
    return [kept | common for kept in keeping]


def _names_inside(model: nn.Module, unit: nn.Module) -> set[str]:
    """Names in `model` of the parameters and buffers in modules of `unit`, under all names of these."""
    modules = set(unit.modules())
    return {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules(remove_duplicate=False)
        if module in modules
        for name in (*module._parameters, *module._buffers)
    }


def _hollow(part: nn.Module, kept: set[str], stage: ModelStage) -> None:
    """Replace parameters and buffers that are not `kept` by attributes without values."""
    for path, module in list(part.named_modules()):
        for held in (module._parameters, module._buffers):
            for name, tensor in list(held.items()):
                its_path = f"{path}.{name}" if path else name
                if tensor is not None and its_path not in kept:
                    del held[name]
                    vars(module)[name] = Placeholder.of(its_path, tensor, stage.device, stage.passes_by)


def _structure(model: nn.Module, before: set[str], inside: set[str]) -> nn.Module:
    """A copy of the model that shares its parameters, except those in `inside` and in `before` (of earlier stages).

    It copies buffers, too: stages change them at different times.
    """
    named = list(model.named_parameters(remove_duplicate=False))
    copied = {id(parameter) for name, parameter in named if name in before}
    copied &= {id(parameter) for name, parameter in named if name in inside}
    memo: dict[int, Any] = {id(parameter): parameter for _, parameter in named if id(parameter) not in copied}
    return duplicate(model, memo)


def _through_stage(call: Callable[..., Any]) -> Callable[..., Any]:
    def pass_through(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        stage, name = vars(self)[STAGE]
        if stage.current is None:
            return call(self, *args, **kwargs)
        return stage.current.call(name, functools.partial(call, self), args, kwargs)

    return pass_through


def _until_done(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        stage, _ = vars(self)[STAGE]
        visit = stage.current
        if visit is not None:
            visit.passes_by = True
        try:
            output = forward(self, *args, **kwargs)
        except _Done:
            return tuple(visit.values[value] for value in stage.outgoing)
        finally:
            if visit is not None:
                visit.passes_by = False
        need_values(output)
        if visit is None or visit.count == len(stage.route.calls):
            return output
        raise StrategyError(
            f"the model ended after {visit.count} calls of its modules, and on the sample batch there were "
            f"{len(stage.route.calls)}; a pipeline runs models that call the same modules in the same order"
        )

    return run


ObservedCalls = tuple[Sequence[Sequence[TensorSpec]], Any]
"""The shapes that each call of a model's units returns, and the model's output."""


class ShapeOracle:
    """Replaces the other processes in a fake world: gives the shapes that stages send, and the loss.

    It runs `part`, a stage made by `cut` that has all calls of the model, on fake tensors, which take no memory. The
    same strategy is applied to it as to the stages.
    """

    def __init__(self, part: nn.Module) -> None:
        self._part, self._stage, self._reduction = part, stage_of(part), GradientSync(part)

    @property
    def tensors(self) -> Iterator[torch.Tensor]:
        """The oracle's tensors, which no process of the pipeline holds."""
        yield from self._part.parameters()
        yield from self._part.buffers()

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ObservedCalls:
        part = self._part
        with torch.no_grad(), preserved_state(part), self._reduction.forward(), self._stage.visit((), ()) as visit:
            output = part(*args, **kwargs)
        return visit.made, output
