"""The meaning of a trainer's configuration in atorch's methods, with an entry for every key."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from atorch.cost.parallelism import AXES, BATCH_AXES, REPLICA_AXES
from atorch.errors import ArgumentError, StrategyError, shown

if TYPE_CHECKING:
    from atorch.auto.strategy import Strategy
    from atorch.trainer_configs.source import Source


Kind = Literal["used", "assumed", "not expressed", "no effect", "unknown"]

NO_EFFECT: tuple[Kind, str] = ("no effect", "neither the estimate of memory nor that of time depends on it")
DTYPES: Mapping[str, str] = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
"""The planner's names of types → torch's."""


def dtype_of(value: object) -> str | None:
    """The planner's name of a type that a configuration names, such as "torch.bfloat16"; None if it is none."""
    word = str(value).removeprefix("torch.")
    return next((name for name, of_torch in DTYPES.items() if word in (name, of_torch)), None)


class Traits(NamedTuple):
    """Traits of a trainer in which it differs from atorch."""

    kernels: Mapping[str, Any] = {}  # fields of `Implementation`: which tensors the blocks of a known shape save
    cost: Mapping[str, Any] = {}  # fields of `Cost`


NARROW = Traits({"fused_projections": False}, {"reduced_itemsize": 0.0, "casts_shards": True})
"""Gradients are reduced in the type that parameters are gathered in, as Accelerate and DeepSpeed do. Accelerate's FSDP
shards fp32. Transformers' blocks have five products after their norms; under autocast all cast the norm's output."""


@dataclass(frozen=True)
class Entry:
    """One key of a configuration and what became of it.

    Args:
        key: the path of the key, such as "fsdp_config.fsdp_version" or "--tensor-model-parallel-size".
        kind: "used": the note says where it went. "assumed": only the trainer fills the value in, or a value is
            missing; the note says what was assumed. "not expressed": the planner has no such thing; the note says what
            it does instead. "no effect": neither memory nor time depend on it. "unknown": the tool has no such key.
    """

    key: str
    value: Any  # as JSON holds it; None of a key that the file does not have
    kind: Kind
    note: str


@dataclass(frozen=True, kw_only=True)
class TrainingSetup:
    """A trainer's configuration. None stands for what it does not say, or what only the trainer fills in.

    Args:
        tool: the name of the target that it was read by, or is for.
        methods: methods in the list form of `Strategy.of`, without parallel_mode and micro_batch, which follow from
            `axes` and `accumulation`.
        axes: sizes of the mesh's axes by name. Data takes the processes that are left, unless it is given; the axis
            zero is given for shards with replicas between them (HSDP).
        reduces_each: sharded gradients are reduced with each micro-batch, not once a step.
        micro_batch: samples of one forward pass of a process (of a pipeline: of one of its micro-batches).
        accumulation: micro-batches of a step on one process.
        global_batch: samples of a step on all processes.
        seq: tokens of a sample.
        model: an id on the Hub, or a path. shape: options of `atorch plan` by name, such as {"layers": 32}.
        knobs: knobs of `PlanRequest` that say how the model is trained: lora, qlora, optimizer, dtype, attention,
            cross_entropy.
        traits: of the trainer under this configuration.
        loads_whole: every process of a sharded job loads the whole model into host memory.
    """

    tool: str
    methods: tuple[Any, ...] = ()
    axes: Mapping[str, int] = field(default_factory=dict)
    reduces_each: bool = False
    num_nodes: int | None = None
    devices_per_node: int | None = None
    micro_batch: int | None = None
    accumulation: int | None = None
    global_batch: int | None = None
    seq: int | None = None
    model: str | None = None
    shape: Mapping[str, int] = field(default_factory=dict)
    knobs: Mapping[str, Any] = field(default_factory=dict)
    traits: Traits = Traits()
    loads_whole: bool = False
    entries: tuple[Entry, ...] = ()

    def __post_init__(self) -> None:
        for name, size in self.axes.items():
            if name not in AXES or size < 1:
                raise ArgumentError(f"the mesh has {name!r} of {size}; axes are {', '.join(AXES)}, of at least 1")

    @property
    def world_size(self) -> int | None:
        """The number of processes, or None if the configuration does not say it."""
        if self.num_nodes is None or self.devices_per_node is None:
            return None
        return self.num_nodes * self.devices_per_node

    def shares(self, world_size: int) -> int:
        """The number of processes that see different samples.

        Raises:
            StrategyError: the axes do not multiply to the number of processes.
        """
        inner = math.prod(size for name, size in self.axes.items() if name not in BATCH_AXES)
        zero, data = self.axes.get("zero", 1), self.axes.get("data")
        product = inner * zero * (data or 1)
        if world_size % product or (data is not None and product != world_size):
            terms = " × ".join(f"{name} {size}" for name, size in self.axes.items() if size > 1) or "1"
            verb = "do not divide" if data is None else "are not"
            raise StrategyError(
                f"the mesh {terms} = {product} processes, which {verb} the {world_size} there are; change one of the "
                f"sizes, or start {product} processes{'' if data is not None else ' or a multiple'}"
            )
        return world_size // inner

    def batches(self, world_size: int) -> tuple[int | None, int | None, int | None]:
        """(micro-batch, accumulation, global batch): those that are given, and the one that follows from the others.

        Raises:
            ArgumentError: they contradict each other.
        """
        shares = self.shares(world_size)
        micro, count, total = self.micro_batch, self.accumulation, self.global_batch
        known = (micro or 1) * (count or 1) * shares
        if total is None:
            return micro, count, None if micro is None or count is None else known
        if total % known or (micro is not None and count is not None and total != known):
            parts = {"micro-batch": micro, "accumulation": count, "processes that see different samples": shares}
            terms = " × ".join(f"{size} ({name})" for name, size in parts.items() if size is not None)
            raise ArgumentError(
                f"the global batch is {total}, and {terms} = {known}"
                f"{'' if micro and count else f', which does not divide {total}'}; change one of them"
            )
        if micro is not None:
            return micro, total // known if count is None else count, total
        return (None, None, total) if count is None else (total // known, count, total)

    def strategy(self, world_size: int) -> Strategy:
        """The complete strategy for so many processes, with their mesh and micro-batches.

        Raises:
            ArgumentError, StrategyError: the sizes contradict each other, or the methods do.
        """
        from atorch.auto.opt_lib.shared.defaults import complete
        from atorch.auto.strategy import Strategy

        micro, count, _ = self.batches(world_size)
        data = self.shares(world_size) // self.axes.get("zero", 1)
        sizes = {**self.axes, "data": data}
        slices = [[name, sizes[name]] for name in AXES if sizes.get(name, 1) > 1]
        strategy = Strategy.of([["parallel_mode", {"slices": slices}], *self.methods] if slices else [*self.methods])
        if math.prod(sizes.get(name, 1) for name in REPLICA_AXES) == 1:
            strategy = Strategy(tuple(method for method in strategy if not method.needs_replicas))
        if count is not None and count > 1:
            size = {"count": count} if micro is None else {"size": micro}
            reduces = {"reduce": "each"} if self.reduces_each and strategy.splits_over("zero") else {}
            strategy = strategy.with_method(["micro_batch", {**size, **reduces}])
        return complete(strategy, world_size)

    @classmethod
    def of_strategy(
        cls, strategy: Strategy, tool: str, num_nodes: int, devices_per_node: int, global_batch: int, **more: Any
    ) -> TrainingSetup:
        """The setup of a complete strategy: the inverse of `strategy`.

        Raises:
            StrategyError: a knob has no form in a file, or the micro-batches of a process are not known.
        """
        from atorch.auto.opt_lib.micro_batch import MicroBatch
        from atorch.auto.opt_lib.parallel_mode import ParallelMode
        from atorch.auto.opt_lib.pipeline_parallel import PipelineParallel

        mode, cut, stages = strategy.get(ParallelMode), strategy.get(MicroBatch), strategy.get(PipelineParallel)
        axes = dict(mode.slices) if mode is not None else {}
        axes.pop("data", None)
        setup = cls(tool=tool, axes=axes, num_nodes=num_nodes, devices_per_node=devices_per_node, **more)
        rows = global_batch // setup.shares(num_nodes * devices_per_node)
        size = rows if cut is None else cut.size if cut.count is None else rows // cut.count
        if cut is None and stages is not None and stages.micro_batches is not None:
            size = rows // stages.micro_batches
        if not isinstance(size, int) or size < 1 or rows % size:
            raise StrategyError(f"{shown(str(cut))} does not divide {rows} samples of a process; give a size")
        derived = ("parallel_mode", "micro_batch")  # and ddp, which `complete` adds
        kept = [item for item in strategy.to_list() if item != "ddp" and item[0] not in derived and item not in derived]
        return replace(
            setup,
            methods=tuple(kept),
            micro_batch=size,
            accumulation=rows // size,
            global_batch=global_batch,
            reduces_each=cut is not None and cut.reduce == "each",
        )


class Draft:
    """The parts of a setup as a reader finds them.

    `precision` is the word of a trainer: fp32, bf16, fp16 or fp8, None as long as nothing says it. The method for it
    depends on the engine, so `set_precision` adds it in the end.
    """

    def __init__(self, **fields: Any) -> None:
        self.fields = fields
        self.axes: dict[str, int] = {}
        self.knobs: dict[str, Any] = {}
        self.precision: str | None = None
        self.weights: str | None = None  # the type that they are loaded in
        self._methods: dict[str, Any] = {}

    def add(self, name: str, **config: Any) -> None:
        """Add a method, in place of an earlier one of this name or of its slot."""
        slot = SLOTS.get(name, name)
        self._methods.pop(slot, None)
        self._methods[slot] = [name, config] if config else name

    def split(self, axis: str, size: int | None, method: str, **config: Any) -> str:
        """Split over an axis of more than one process by a method, and say so: "tensor 2: tensor_parallel"."""
        if size is None or size <= 1:
            return "no split"
        self.axes[axis] = size
        self.add(method, **config)
        return f"{axis} {size}: {method}"

    def share_experts(self, size: int, **config: Any) -> str:
        """Share the experts of blocks between so many processes, and say so."""
        if size <= 1:
            return "experts are not spread over processes"
        self.add("expert_parallel", size=size, **config)
        return f"expert_parallel: {size} processes share the experts of a block, each of which is whole"

    def set_traits(self, **cost: Any) -> None:
        """Set fields of the cost in which the trainer differs."""
        held: Traits = self.fields.get("traits", Traits())
        self.fields["traits"] = held._replace(cost={**held.cost, **cost})

    def has(self, *names: str) -> bool:
        return any(_pair(item)[0] in names for item in self._methods.values())

    def config(self, name: str) -> dict[str, Any] | None:
        """The configuration of a method, or None if it is not there."""
        return next((config for held, config in map(_pair, self._methods.values()) if held == name), None)

    def set_precision(self) -> str:
        """Add the method of the precision, if there is none, and say which it is."""
        if self.has("half", "amp_native"):
            return "as the engine has it"
        is_sharded = self.has("fsdp", "zero2")
        if self.weights in ("bf16", "fp16") and not (is_sharded and self.precision):
            self.knobs["dtype"] = self.weights
            return f"dtype {self.weights}: weights, gradients and optimizer states, without fp32 copies"
        if self.precision in (None, "fp32"):
            return "computed in the type of the weights, fp32"
        dtype = "fp16" if self.precision == "fp16" else "bf16"
        if not is_sharded:
            self.add("amp_native", dtype=dtype)
            return f"amp_native: products in {dtype}, and weights in fp32"
        self.add("half", dtype=dtype)
        return f"half: weights are gathered and gradients reduced in {dtype}, and the optimizer steps fp32 shards"

    def setup(self, tool: str, entries: tuple[Entry, ...]) -> TrainingSetup:
        methods = tuple(self._methods.values())
        return TrainingSetup(
            tool=tool, methods=methods, axes=self.axes, knobs=self.knobs, entries=entries, **self.fields
        )


def _pair(item: Any) -> tuple[str, dict[str, Any]]:
    return (item, {}) if isinstance(item, str) else (item[0], item[1])


SLOTS: Mapping[str, str] = {
    **dict.fromkeys(("ddp", "zero1", "zero2", "fsdp", "chunk"), "data_parallel"),
    **dict.fromkeys(("half", "amp_native"), "precision"),
}


def lacking_methods(
    strategy: Strategy, absent: Mapping[str, str], knobs: Mapping[str, Collection[str]]
) -> Iterator[str]:
    """Reasons against methods that a trainer lacks, and against methods with other knobs than it has.

    Args:
        absent: method → reason why the trainer has nothing like it.
        knobs: method → its knobs that the trainer can express.
    """
    for method in strategy:
        if method.name in absent:
            yield f"{method}: {absent[method.name]}"
        elif method.planned_only and method.name not in knobs:
            yield f"{method}: the trainer's files have nothing like it"
        elif lacking := sorted(set(method.model_dump(exclude_defaults=True)).difference(knobs.get(method.name, ()))):
            yield f"{method}: there is no {' and no '.join(lacking)}"


@dataclass(frozen=True)
class Target:
    """A trainer whose configuration can be read and written.

    Args:
        title: its name in sentences.
        recognises: True if the source has this format.
        read: the setup of a source. Raises ArgumentError for values that the trainer would not take either.
        lacking: the reasons of `lacks`.
        write: the files of a setup whose strategy `lacks` nothing, by name.
        command: the command that starts training on one node, for `sh`. The variables NNODES, NODE_RANK, MASTER_ADDR,
            MASTER_PORT and GPUS (of a node) are set; `train.py` stands for the user's script.
        traits: of the trainer with the files that it writes.
    """

    name: str
    title: str
    recognises: Callable[[Source], bool]
    read: Callable[[Source], TrainingSetup]
    lacking: Callable[[Strategy], Iterator[str]]
    write: Callable[[TrainingSetup], Mapping[str, str]]
    command: Callable[[TrainingSetup], str]
    traits: Traits = Traits()

    def lacks(self, strategy: Strategy) -> tuple[str, ...]:
        """Reasons, each with the name of what the trainer does not have: a method, a setting or a combination.

        Empty if it can express the strategy, which is complete or a part of one. More methods never make a part
        expressible that lacks something.
        """
        return tuple(self.lacking(strategy))

    def sample(self, **more: Any) -> TrainingSetup:
        """A setup on one device: the names of files, and refusals of knobs, do not depend on the strategy."""
        return TrainingSetup(tool=self.name, micro_batch=1, accumulation=1, global_batch=1, seq=1, **more)

    def check(self, knobs: Mapping[str, Any]) -> None:
        """Raise ArgumentError if the trainer cannot express any strategy, or cannot train as the knobs say."""
        from atorch.auto.strategy import Strategy

        lacking = self.lacks(Strategy(()))
        if lacking:
            raise ArgumentError(f"no plan is for {self.title}: it lacks {'; '.join(lacking)}")
        self.write(self.sample(knobs=knobs))
