"""Cuts a model by its graph if modules do not show the dataflow: parameters used directly, tensors on attributes.

`torch.export` gives the operations of a forward pass in their order. They form segments, one per stage, of equal
estimated time, with boundaries where few bytes cross. The model's forward is replaced by a run of these segments, which
are modules: so capture and cut work as for any other model. Parameters stay in place, under the user's names, and are
passed to the segments that use them. Values that depend on no parameter, such as masks, are computed by every stage.

A graph is valid for one shape of the inputs, and one training mode of each module. Others are exported at first use,
on a fake copy, and must have the same operations: they are cut at the same places.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export.graph_signature import InputKind, OutputKind
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map_only, tree_structure, tree_unflatten
from torch.utils.flop_counter import FlopCounterMode

from atorch.errors import StrategyError
from atorch.model.wrapper import lift_forward, override_forward
from atorch.runtime.pipeline.capture.stage_dataflow import faked

SEGMENTS = "atorch_segments"
"""The child module of a model that has its segments."""
_WINDOW = 0.25
"""The largest shift of a boundary, as a fraction of a stage's time, to let fewer bytes cross."""


class Speeds(NamedTuple):
    """Speeds of a device, or numbers in the same proportion."""

    flops: float  # a second
    num_bytes: float


class Subgraph(NamedTuple):
    """Operations of a graph, with the names of input and output values."""

    run: fx.GraphModule
    takes: tuple[str, ...]
    gives: tuple[str, ...]

    def add_to(self, values: dict[str, Any], run: Callable[..., Any]) -> None:
        values.update(zip(self.gives, run(*(values[name] for name in self.takes)), strict=True))


@dataclass(frozen=True, eq=False)
class Program:
    """A model's forward for inputs of one shape: named values, operations that all stages compute, and segments."""

    operations: tuple[str, ...]
    boundaries: tuple[int, ...]
    attributes: Mapping[str, str]  # names of values → of parameters, buffers and tensors of the model
    constants: Mapping[str, Tensor]
    inputs: tuple[str, ...]
    free: Subgraph
    segments: tuple[Subgraph, ...]
    outputs: tuple[Any, ...]  # names of tensors, or other values themselves
    out_spec: Any


class GraphStage(nn.Module):
    """A segment in the sequence of stages; its graph is passed with its inputs."""

    def forward(self, run: fx.GraphModule, *values: Any) -> tuple[Tensor, ...]:
        results: tuple[Tensor, ...] = run(*values)
        return results


class Exported:
    """The programs of a model.

    source: a copy of the model on fake tensors of `mode`, which is exported.
    """

    def __init__(self, source: nn.Module, mode: FakeTensorMode, num_segments: int, speeds: Speeds) -> None:
        self._source, self._mode, self._num_segments, self._speeds = source, mode, num_segments, speeds
        self._programs: dict[Any, Program] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Exported:
        return self  # all stages of a process share the exported programs

    def program(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Program:
        """The program for inputs like these.

        Raises:
            StrategyError: the model cannot be exported, has too few operations, or others than in the first program.
        """
        leaves, spec = tree_flatten((args, kwargs))
        modes = tuple(module.training for _, module in zip(self._source.modules(), model.modules(), strict=False))
        key = (modes, spec, tuple(map(_kind, leaves)))
        if key not in self._programs:
            self._programs[key] = self._make(model, modes, args, kwargs)
        return self._programs[key]

    def run(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The output of `model`, whose segments are called one after another."""
        program = self.program(model, args, kwargs)
        values: dict[str, Any] = dict(zip(program.inputs, tree_flatten((args, kwargs))[0], strict=True))
        for name, path in program.attributes.items():
            values[name] = operator.attrgetter(path)(model)
        values.update(program.constants)
        program.free.add_to(values, program.free.run)
        for segment, piece in zip(getattr(model, SEGMENTS), program.segments, strict=True):
            piece.add_to(values, lambda *inputs, segment=segment, piece=piece: segment(piece.run, *inputs))
        outputs = [values[output] if isinstance(output, _Name) else output for output in program.outputs]
        return tree_unflatten(outputs, program.out_spec)

    def _make(
        self, model: nn.Module, modes: tuple[bool, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Program:
        for module, training in zip(self._source.modules(), modes, strict=True):
            module.training = training
        with _disable_current_modes(), torch.enable_grad():
            graph = _Graph(_export(self._source, self._mode, args, kwargs), model)
            if not self._programs:
                return graph.program(graph.boundaries(self._num_segments, self._speeds))
        first = next(iter(self._programs.values()))
        if graph.operations != first.operations:
            raise StrategyError(
                f"{type(self._source).__name__} is cut by its graph, and does other operations on this batch than on "
                "the sample; give batches of one length, or a model whose modules pass on what they return"
            )
        return graph.program(first.boundaries)


class _Name(str): ...


def install(model: nn.Module, exported: Exported, num_segments: int) -> dict[str, nn.Module]:
    """Make the forward of `model` run segments, in place; returns these by name."""
    setattr(model, SEGMENTS, nn.ModuleList(GraphStage() for _ in range(num_segments)))
    vars(model)[_EXPORTED] = exported
    override_forward(model, _by_graph)
    return {f"{SEGMENTS}.{number}": model.get_submodule(f"{SEGMENTS}.{number}") for number in range(num_segments)}


def uninstall(model: nn.Module) -> None:
    """Undo `install`, if it was called."""
    if _EXPORTED not in vars(model):
        return
    lift_forward(model, _by_graph)
    delattr(model, SEGMENTS)
    del vars(model)[_EXPORTED]


_EXPORTED = "_atorch_exported"


def _by_graph(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return vars(self)[_EXPORTED].run(self, args, kwargs)

    return run


def _export(source: nn.Module, mode: FakeTensorMode, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with mode:
        args, kwargs = tree_map_only(Tensor, faked, (args, kwargs))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of tensors assigned to attributes: such models are why graphs are used
            program = torch.export.export(source, args, kwargs, strict=False)
    except Exception as error:  # export may fail in any way
        message = str(error).strip().partition("\n")[0]
        raise StrategyError(
            f"torch.export does not take {type(source).__name__} ({type(error).__name__}: {message})"
        ) from error
    if program.call_spec.in_spec != tree_structure((args, kwargs)):
        raise StrategyError(f"torch.export takes the arguments of {type(source).__name__} otherwise than it is called")
    return program


def _kind(leaf: Any) -> Any:
    return (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else leaf


class _Graph:
    def __init__(self, program: Any, model: nn.Module) -> None:
        self._program, self._module = program, program.graph_module
        self._learnt = {parameter.untyped_storage()._cdata: name for name, parameter in model.named_parameters()}
        self._nodes = [node for node in self._module.graph.nodes if node.op == "call_function"]
        self._given = [node for node in self._module.graph.nodes if node.op == "placeholder"]
        self._specs = dict(zip(self._given, program.graph_signature.input_specs, strict=True))
        self.operations = tuple(str(node.target) for node in self._nodes)
        self._check()
        learns = {node for node, spec in self._specs.items() if spec.kind is InputKind.PARAMETER}
        for node in self._nodes:
            if not learns.isdisjoint(node.all_input_nodes):
                learns.add(node)
        self._free = [node for node in self._nodes if node not in learns]
        self._learning = [node for node in self._nodes if node in learns]
        (output,) = (node for node in self._module.graph.nodes if node.op == "output")
        self._outputs = output.args[0]
        # The indices of the first and the last operation that use each value and depend on parameters.
        self._first_use: dict[fx.Node, int] = {}
        self._last_use: dict[fx.Node, int] = {}
        for number, node in enumerate(self._learning):
            self._last_use.update(dict.fromkeys(node.all_input_nodes, number))
            for used in node.all_input_nodes:
                self._first_use.setdefault(used, number)
        outputs = (output for output in self._outputs if isinstance(output, fx.Node))
        self._last_use.update(dict.fromkeys(outputs, len(self._learning)))

    def _check(self) -> None:
        signature, buffers = self._program.graph_signature, set()
        for node, spec in self._specs.items():
            if spec.kind in (InputKind.CUSTOM_OBJ, InputKind.TOKEN):
                raise StrategyError(f"the graph takes {node.name}, which is not a tensor")
            if spec.kind is InputKind.BUFFER:
                buffers.add(node)
        changed = [output for output in signature.output_specs if output.kind is not OutputKind.USER_OUTPUT]
        written = [node for node in self._nodes if _writes_to(node, buffers)]
        if changed or written:
            raise StrategyError("the model changes its buffers as it runs, of which every stage has a copy")

    def crossing(self, boundary: int) -> list[fx.Node]:
        """The values from operations before index `boundary` that it, later operations or the output use."""
        return [node for node in self._learning[:boundary] if self._last_use.get(node, -1) >= boundary]

    def boundaries(self, count: int, speeds: Speeds) -> tuple[int, ...]:
        """The boundaries of `count` segments of about equal time, where few bytes cross."""
        passed = [0.0]
        for node in self._learning:
            passed.append(passed[-1] + _seconds(node, speeds))
        share, chosen = passed[-1] / count, [0]
        for number in range(1, count):
            ideal = number * share
            able = [at for at in range(chosen[-1] + 1, len(self._learning)) if self._can_part(at)]
            if not able:
                raise StrategyError(f"the graph has too few operations to part it into {count} stages")
            near = [at for at in able if abs(passed[at] - ideal) <= _WINDOW * share]
            nearest = [min(able, key=lambda at: abs(passed[at] - ideal))]
            chosen.append(min(near or nearest, key=lambda at: (self._crossing_bytes(at), abs(passed[at] - ideal))))
        return tuple(chosen)

    def _can_part(self, boundary: int) -> bool:
        crossing = self.crossing(boundary)
        return bool(crossing) and all(isinstance(node.meta["val"], Tensor) for node in crossing)

    def _crossing_bytes(self, boundary: int) -> int:
        """Bytes sent there per step of one micro-batch: values, and gradients of weights used on both sides."""
        both = (node for node in self._given if self._first_use.get(node, boundary) < boundary <= self._last_use[node])
        weights = (node for node in both if self._specs[node].kind is InputKind.PARAMETER)
        return sum(map(_num_bytes, (*self.crossing(boundary), *weights)))

    def program(self, boundaries: Sequence[int]) -> Program:
        ends = (*boundaries[1:], len(self._learning))
        pieces = []
        for start, end in zip(boundaries, ends, strict=True):
            inside = self._learning[start:end]
            pieces.append(self._piece(inside, [node for node in inside if self._last_use.get(node, -1) >= end]))
        kinds: dict[InputKind, list[fx.Node]] = {}
        for node, spec in self._specs.items():
            kinds.setdefault(spec.kind, []).append(node)
        constants = {node.name: self._constant(node) for node in kinds.get(InputKind.CONSTANT_TENSOR, ())}
        kept = (*kinds.get(InputKind.PARAMETER, ()), *kinds.get(InputKind.BUFFER, ()))
        return Program(
            operations=self.operations,
            boundaries=tuple(boundaries),
            attributes={node.name: self._specs[node].target for node in kept},
            constants=constants,
            inputs=tuple(node.name for node in kinds.get(InputKind.USER_INPUT, ())),
            free=self._piece(self._free, [node for node in self._free if node in self._last_use]),
            segments=tuple(pieces),
            outputs=tuple(_Name(output.name) if isinstance(output, fx.Node) else output for output in self._outputs),
            out_spec=self._program.call_spec.out_spec,
        )

    def _constant(self, node: fx.Node) -> Tensor:
        name = self._specs[node].target
        value = self._program.constants[name]
        if isinstance(value, FakeTensor) or not isinstance(value, Tensor):
            raise StrategyError(f"the model uses {name}, a tensor that is not a buffer; make it one by register_buffer")
        learnt = self._learnt.get(value.untyped_storage()._cdata)
        if learnt is not None:
            raise StrategyError(
                f"the model reaches {learnt} by a global variable or a class attribute, where a graph takes it for a "
                "constant; keep it as an attribute of the module that uses it"
            )
        return value

    def _piece(self, nodes: Iterable[fx.Node], gives: Sequence[fx.Node]) -> Subgraph:
        inside = list(nodes)
        graph, copies = fx.Graph(), {}
        outside = [used for node in inside for used in node.all_input_nodes if used.op != "get_attr"]
        takes = [used for used in dict.fromkeys(outside) if used not in set(inside)]
        for used in takes:
            copies[used] = graph.placeholder(used.name)
        for node in inside:
            for used in node.all_input_nodes:
                if used.op == "get_attr" and used not in copies:
                    copies[used] = graph.node_copy(used)
            copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(tuple(copies[node] for node in gives))
        run = fx.GraphModule(self._module, graph)
        return Subgraph(run, tuple(used.name for used in takes), tuple(node.name for node in gives))


def _writes_to(node: fx.Node, buffers: set[fx.Node]) -> bool:
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return False
    if schema.name == "aten::batch_norm":
        return bool(node.args[5])  # `training`: it writes running statistics, which its schema does not declare
    pairs = zip(schema.arguments, node.args, strict=False)
    return any(formal.alias_info is not None and formal.alias_info.is_write and arg in buffers for formal, arg in pairs)


def _seconds(node: fx.Node, speeds: Speeds) -> float:
    """Seconds of an operation on a device, forward: the time of its FLOPs plus that of its reads and writes."""
    moved = _num_bytes(node) + sum(map(_num_bytes, node.all_input_nodes))
    return _flops(node) / speeds.flops + moved / speeds.num_bytes


def _flops(node: fx.Node) -> float:
    if not isinstance(node.target, torch._ops.OpOverload):
        return 0.0
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda argument: argument.meta.get("val"))
    values = [used for used in (*node.all_input_nodes, node) if isinstance(used.meta.get("val"), FakeTensor)]
    if not values:
        return 0.0
    with values[0].meta["val"].fake_mode, torch.no_grad(), FlopCounterMode(display=False) as counter:
        node.target(*args, **kwargs)
    return float(counter.get_total_flops())


def _num_bytes(node: fx.Node) -> int:
    value = node.meta.get("val")
    return value.numel() * value.itemsize if isinstance(value, Tensor) else 0
