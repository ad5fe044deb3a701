"""A stage of a pipeline: the whole model, of which only the stage's own units hold parameters and run.

A stage runs the model's own forward, so masks, positions and whatever else lies between units are made as ever. Units
of other stages are hollow: the module and its attributes stay, its parameters are on the meta device and no longer its
own, and a call of it returns what an earlier stage sent, or stand-ins of the right shape for what nobody needs here.
At the first call that is a later stage's the forward ends, and what that stage needs is handed over.

A unit that several stages call is held by each of them, and so is a parameter outside of units that several need; their
gradients are added up (`ties`).
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
from atorch.model.method_override import override
from atorch.model.pytree import map_leaves, tensors_in
from atorch.runtime.pipeline.capture.shapes import TensorSpec, shape_of
from atorch.runtime.pipeline.capture.stage_dataflow import CallOutput, OutputIndex, Route
from atorch.runtime.pipeline.remote_parameter import Away, need_values

STAGE = "_atorch_stage"
"""The attribute in which units know their stage and their name, and a stage's model its stage."""


@dataclass(eq=False)
class ModelStage:
    """The calls from `start` to before `stop`, and what crosses before and after them."""

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
        """Values that earlier stages hand over."""
        return self.route.wires(self.start)

    @functools.cached_property
    def outgoing(self) -> tuple[CallOutput, ...]:
        """Values that this stage hands over, the next one's `incoming`."""
        return () if self.is_last else self.route.wires(self.stop)

    def passes_by(self) -> bool:
        """True if the model's code between units runs, of which a stage needs part."""
        return self.current is not None and self.current.passes_by

    @contextmanager
    def visit(self, wires: Sequence[Tensor], shapes: Sequence[Sequence[TensorSpec]]) -> Iterator[_Visit]:
        """Inside, calling the stage's model runs the stage on what came in; `shapes` are those of all calls before."""
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
    made: list[list[TensorSpec]] = field(default_factory=list)  # what the stage's own calls returned
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

    def handed_over(self) -> tuple[Tensor, ...]:
        return tuple(self.values[value] for value in self.stage.outgoing)

    def _sent(self, number: int) -> Any:
        def fill(leaf: Any, place: str) -> Any:
            if not isinstance(leaf, OutputIndex):
                return leaf
            value = CallOutput(number, leaf)
            sent = self.values.get(value)
            if sent is None:
                sent = self.shapes[number][leaf].stand_in(self.stage.device)
            return self._own(value, sent)

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
        """`tensor`, or a copy of what the model is going to write to: the next stage does so, too."""
        return tensor.clone() if value in self.stage.route.written else tensor


class _Done(BaseException):
    """Ends a model's forward where a later stage goes on; no handler of the model's own shall stop it."""


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
    """The stages `mine` of the model, cut before the calls `starts`: each a module that is called as the model is.

    The first is `model` itself, in place; others are copies of its structure. Parameters of no stage in `mine` are let
    go of. A stage's module has it as attribute (`stage_of`).

    shares: a parameter that several of them hold is one and the same, and not a copy in each.
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
        # A forward that somebody put on the instance hides that of the class; then the call itself is overridden.
        override(part, "__call__" if "forward" in vars(part) else "forward", _until_done)
    return tuple(parts)


def stage_of(part: nn.Module) -> ModelStage:
    """The stage that a module made by `cut` is, also where something wraps it."""
    return getattr(part, STAGE)[0]  # type: ignore[no-any-return]


def holders(
    model: nn.Module, units: Mapping[str, nn.Module], route: Route, starts: Sequence[int]
) -> list[tuple[tuple[str, ...], tuple[int, ...]]]:
    """Parameters that several stages hold: all their names, and the stages, in ascending order."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    keeping = _keeping(model, units, route, starts)
    found = []
    for same in names.values():
        stages = tuple(index for index, kept in enumerate(keeping) if not kept.isdisjoint(same))
        if len(stages) > 1:
            found.append((tuple(same), stages))
    return found


def held_for_loss(model: nn.Module, units: Mapping[str, nn.Module], route: Route, starts: Sequence[int]) -> list[str]:
    """Names of the parameters that the last stage holds only because the loss function reads them."""
    unread = replace(route, read_by_loss=frozenset())
    held, own = (_keeping(model, units, each, starts)[-1] for each in (route, unread))
    return [name for name, _ in model.named_parameters() if name in held and name not in own]


def _keeping(model: nn.Module, units: Mapping[str, nn.Module], route: Route, starts: Sequence[int]) -> list[set[str]]:
    """Names of each stage's parameters and buffers, under every name that they have in the stage's modules.

    What no call needs is the first stage's; buffers outside of units are everybody's.
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
    """Names in `model` of the parameters and buffers that are in modules of `unit`, under all names of these."""
    modules = set(unit.modules())
    return {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules(remove_duplicate=False)
        if module in modules
        for name in (*module._parameters, *module._buffers)
    }


def _hollow(part: nn.Module, kept: set[str], stage: ModelStage) -> None:
    """Let go of parameters and buffers that are not `kept`: attributes without values take their places."""
    for path, module in list(part.named_modules()):
        for held in (module._parameters, module._buffers):
            for name, tensor in list(held.items()):
                if tensor is not None and (f"{path}.{name}" if path else name) not in kept:
                    del held[name]
                    its_path = f"{path}.{name}" if path else name
                    vars(module)[name] = Away.of(its_path, tensor, stage.device, stage.passes_by)


def _structure(model: nn.Module, before: set[str], own: set[str]) -> nn.Module:
    """A copy of the model that has the same parameters, but those that stages `before` hold and it as well.

    Buffers are its own: stages change them at other times.
    """
    named = list(model.named_parameters(remove_duplicate=False))
    twice = {id(parameter) for name, parameter in named if name in before}
    twice &= {id(parameter) for name, parameter in named if name in own}
    memo: dict[int, Any] = {id(parameter): parameter for _, parameter in named if id(parameter) not in twice}
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
            return visit.handed_over()
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
