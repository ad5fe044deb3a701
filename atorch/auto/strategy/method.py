"""A method: one optimization as a frozen value. Its type is the optimization, its fields are the knobs.

A method defines its cost (`cost`), its application (`apply`) and the settings that the search may try (`choices`). It
gives the reasons why it cannot run on a machine (`unmet`) or with a model and a mesh (`unfit`). `Phase` is the
composition order; methods of one slot exclude each other.

A package of its own offers a method in its pyproject.toml:

    [project.entry-points."atorch.methods"]
    ema = "atorch_ema:Ema"

An entry point is code. So atorch loads none because it is installed or because a strategy file names it. A script calls
`atorch.load_methods("ema")` first; after that "ema" is a name like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import IntEnum
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from atorch.errors import CapabilityError, StrategyError, near_miss, shown
from atorch.registry import Registry

if TYPE_CHECKING:
    from torch import nn
    from typing_extensions import Self

    from atorch.auto.context import Context
    from atorch.cluster.spec import ClusterSpec
    from atorch.cost import Cost, ModelProfile


PrecisionLevel = Literal["fp32", "autocast", "half", "fp8"]
PRECISIONS: tuple[PrecisionLevel, ...] = get_args(PrecisionLevel)
"""Number formats of training, the most exact first: the model's own, autocast, 16-bit parameters, fp8."""


Simulation = Literal["applied", "left out", "by itself"]


class Phase(IntEnum):
    """The point at which a method is applied: methods apply in this order, whatever order the user gave."""

    MESH = 0
    MODULE = 1
    PRECISION = 2
    TENSOR = 3
    SPLIT = 4
    RECOMPUTE = 5
    COMPILE = 6
    SHARD = 7
    STEP = 8


class Method(BaseModel):
    """Base of all methods. Subclasses declare knobs as fields and register with `@method`."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        allow_inf_nan=False,
        defer_build=True,  # validators are made when first needed: importing stays quick
    )

    name: ClassVar[str] = ""
    phase: ClassVar[Phase]
    slot: ClassVar[str]
    needs_replicas: ClassVar[bool] = False
    """True if it has no effect when a single process holds the parameters."""
    keeps_masters: ClassVar[bool] = False
    """True if it keeps fp32 masters of 16-bit parameters itself, and divides gradients by the loss scale."""
    needs_sample: ClassVar[bool] = False
    """True if it runs the model on `ctx.sample_batch` and observes it before it changes anything."""

    needs_values: ClassVar[bool] = False
    """True if it reads parameters' values before it changes anything, which a model on the meta device lacks."""
    saves_memory: ClassVar[bool] = False
    """True if it trades time for memory, so that a search tries it only if memory is short or it is faster."""
    acts_in_calls: ClassVar[bool] = False
    """True if it acts where modules are called, which a pipeline that is cut by its graph does not do."""
    simulated: ClassVar[Simulation] = "applied"
    """Simulation on fake tensors: the method is applied, or left out, or traces a pass itself and is refused."""
    keeps_on_host: ClassVar[bool] = False
    """True if it keeps data of a step in host memory, which a plan has to allow."""
    places_states: ClassVar[bool] = False
    """True if it decides itself which states and activations are in host memory."""
    defers_backward: ClassVar[bool] = False
    """True if the loss function runs forward and backward in parts, so that no forward shows what a step uses."""
    planned_only: ClassVar[bool] = False
    """True if atorch cannot apply it yet: only plans for a cluster have it, if it is included."""
    recomputes: ClassVar[bool] = False
    """True if backward runs forward again."""
    exclusions: ClassVar[Mapping[str, str]] = {}
    """Names of methods that it cannot be combined with, each with the reason and a remedy."""
    precision_level: ClassVar[PrecisionLevel] = "fp32"
    """The number format it trains in; a search takes none that is less exact than the user allows."""

    @classmethod
    def of(cls, config: Any = None) -> Self:
        """The method from a configuration: `None` for the defaults, a mapping of knobs, or the method's short form.

        Raises:
            StrategyError: an unknown knob (the nearest is named) or an invalid value.
        """
        if config is None:
            config = {}
        if isinstance(config, cls):
            return config
        if isinstance(config, (set, frozenset)):
            raise StrategyError(f"{cls.name} was given the set {shown(config)}; write {cls._dict_for(config)}")
        if not isinstance(config, Mapping):
            raise StrategyError(f"{cls.name} was given {shown(config)}; it takes a dict of {cls._knobs() or 'nothing'}")
        for knob in config:
            if knob not in cls.model_fields:
                hint = near_miss(str(knob), cls.model_fields) if cls.model_fields else "it has none"
                raise StrategyError(f"{cls.name} has no knob {shown(knob)}; {hint}", (str(knob),))
        try:
            return cls(**config)
        except ValidationError as error:
            raise cls._explained(error) from None

    @classmethod
    def _dict_for(cls, pair: set[Any] | frozenset[Any]) -> str:
        """The dict to write instead of a set such as `{"use_ds_zero", True}`."""
        names = [item for item in pair if isinstance(item, str)]
        knobs = [name for name in names if name in cls.model_fields] or names
        if len(pair) != 2 or len(knobs) != 1:
            return f"a dict of {cls._knobs() or 'nothing'}"
        value = next(item for item in pair if item != knobs[0])
        return f"the dict {{{knobs[0]!r}: {value!r}}}"

    @classmethod
    def _knobs(cls) -> str:
        return ", ".join(cls.model_fields)

    @classmethod
    def _explained(cls, error: ValidationError) -> StrategyError:
        faults = error.errors()
        messages = []
        for fault in faults:
            place = ".".join(str(part) for part in (cls.name, *fault["loc"]))
            messages.append(f"{place} was given {shown(fault['input'])}: {fault['msg'].removeprefix('Value error, ')}")
        return StrategyError("; ".join(messages), faults[0]["loc"])

    def __str__(self) -> str:
        """The name with the knobs that are not at their defaults: `amp_native(bf16)`, `micro_batch(count=2)`."""
        knobs = self.model_dump(mode="json", exclude_defaults=True)
        parts = [value if isinstance(value, str) else f"{knob}={_short(value)}" for knob, value in knobs.items()]
        return f"{self.name}({', '.join(parts)})" if parts else self.name

    @property
    def splits(self) -> tuple[str, ...]:
        """Axes of the mesh that the method splits the model over."""
        return ()

    @property
    def spans_blocks(self) -> bool:
        """True if it divides the whole model at once, so that a simulation of fewer blocks cannot be extrapolated."""
        return False

    @property
    def shards_parameters(self) -> tuple[str, ...]:
        """Axes of the mesh over which it shards parameters, so that a process starts with its own part alone."""
        return ()

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the methods without which this one has no effect."""
        return ()

    @property
    def engine(self) -> str:
        """The package with backward or optimizer steps of its own, such as deepspeed; empty if they are torch's."""
        return ""

    @property
    def joins_backward(self) -> str:
        """The reason, with a remedy, why backward cannot leave gradients of weights for later; empty if it can."""
        return ""

    @property
    def numbers(self) -> str:
        """The effect on the numbers of training, as a clause; empty if they stay the model's own."""
        return ""

    def unmet(self, cluster: ClusterSpec) -> str | None:
        """The reason why the hardware cannot run this method; None if it can.

        Raises:
            CapabilityError: a package is missing; the message names the extra that brings it.
        """
        return None

    def unfit(self, cost: Cost) -> str | None:
        """The reason against this method for a model, batch and mesh, or None; `cost` includes the methods before."""
        return self.against_pipeline(cost.schedule) if cost.stages > 1 else None

    def against_pipeline(self, schedule: str) -> str | None:
        """The reason why the method cannot be combined with a pipeline of this schedule, or None."""
        if schedule != "zero_bubble" or not self.joins_backward:
            return None
        return (
            f"the schedule zero_bubble computes gradients of weights after backward, and {self} {self.joins_backward}; "
            "or take the schedule 1f1b or interleaved"
        )

    def in_parts(self, count: int) -> Self:
        """The method for `count` micro-batches a step; itself if it does not set their number."""
        return self

    def settled(self, model: nn.Module) -> Self:
        """The same method for `model`, with names in place of objects of this process such as classes and modules.

        Raises:
            StrategyError: the method does not fit this model.
        """
        return self

    def check(self, ctx: Context) -> None:
        """Raise StrategyError if the method cannot be applied, as far as that is known before any method is applied.

        The check uses the method's knobs, the other methods in `ctx.strategy` with their mesh, and the model's
        structure, device and types. It changes nothing, and cannot use results of earlier methods.
        """

    def check_at_work(self, ctx: Context) -> None:
        """As `check`, for faults that show only when the user's model runs on `ctx.sample_batch`.

        A search calls it before a dry run. It changes nothing; observations go to `ctx.seen`, for all candidates.
        """

    def check_optimizer(self, ctx: Context) -> None:
        """Raise StrategyError if the user's optimizer would compute something else; called before any is applied."""

    def cost(self, cost: Cost) -> Cost:
        """The step's cost with this method."""
        return cost

    def apply(self, ctx: Context) -> Context:
        """A new context with this method applied. May transform `ctx.parts` in place."""
        raise NotImplementedError(f"{type(self).__name__} does not define apply")

    def trace_metadata(self, ctx: Context, axes: Mapping[str, int]) -> Mapping[str, Any]:
        """Observe the model as `apply` would, for a mesh that does not exist here, and return a strategy's metadata.

        With this metadata `apply` needs no values. The model of `ctx` is real, has the earlier methods applied, and is
        not changed. axes: sizes by name.
        """
        return {}

    @classmethod
    def choices(cls, profile: ModelProfile, cluster: ClusterSpec) -> Iterable[Self]:
        """The settings that the search may try for this model and machine; none by default."""
        return ()


def _short(value: Any) -> str:
    return "/".join(map(str, value)) if isinstance(value, list) else str(value)


METHODS: Registry[type[Method]] = Registry("method", home="atorch.auto.opt_lib")

M = TypeVar("M", bound=type[Method])


def method(name: str, *, phase: Phase, slot: str | None = None) -> Callable[[M], M]:
    """Register a Method under `name`. A strategy has at most one method of a `slot` (default: the name)."""

    def register(cls: M) -> M:
        cls.name, cls.phase, cls.slot = name, phase, slot or name
        METHODS.add(name, cls)
        return cls

    return register


class Recipe:
    """A name for several methods. It is expanded when a strategy is built and does not appear in it."""

    name: ClassVar[str]

    @classmethod
    def expand(cls, config: Any, others: tuple[Method, ...]) -> tuple[Method, ...]:
        """The methods of the recipe, given the strategy's `others`."""
        raise NotImplementedError(f"{cls.__name__} does not say what it expands to")


RECIPES: Registry[type[Recipe]] = Registry("recipe")


GROUP = "atorch.methods"


def load_methods(names: str | Sequence[str] | None = None) -> tuple[type[Method], ...]:
    """Load the methods of these names from installed packages; all offered methods if `names` is None.

    Loading a method again returns the same class.

    Raises:
        StrategyError: no installed package offers the name, several do, or another method has it already.
        CapabilityError: the package is installed but its method cannot be loaded.
    """
    offered = _offered()
    wanted = tuple(offered) if names is None else (names,) if isinstance(names, str) else tuple(names)
    return tuple(_load(_the_only(name, offered)) for name in wanted)


def _offered() -> dict[str, list[EntryPoint]]:
    """The entry points of all installed packages, by name."""
    offered: dict[str, list[EntryPoint]] = {}
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        # An editable install on the path may be listed twice; count its methods once.
        others = offered.setdefault(point.name, [])
        if (_package(point), point.value) not in [(_package(other), other.value) for other in others]:
            others.append(point)
    return offered


def _the_only(name: str, offered: dict[str, list[EntryPoint]]) -> EntryPoint:
    points = offered.get(name, [])
    if not points:
        hint = near_miss(str(name), offered) if offered else "none offers any. Install the package that brings it"
        raise StrategyError(f"no installed package offers a method named {shown(name)}; {hint}")
    if len(points) > 1:
        packages = " and ".join(_package(point) for point in points)
        raise StrategyError(f"{packages} both offer a method named {name!r}; uninstall one of them")
    return points[0]


def _load(point: EntryPoint) -> type[Method]:
    if point.name in METHODS and METHODS[point.name].__module__.partition(".")[0] != point.module.partition(".")[0]:
        owner = METHODS[point.name]
        raise StrategyError(
            f"{_package(point)} offers a method named {point.name!r}, but that is the name of "
            f"{owner.__module__}.{owner.__qualname__}; the package must give its method another name"
        )
    where = f"the method {point.name!r} of {_package(point)} cannot be loaded from {point.value!r}"
    try:
        loaded = point.load()
    except (ImportError, AttributeError) as error:
        raise CapabilityError(f"{where}: {error}") from error
    except ValueError as error:  # from the registry: the module registers a name that is taken
        raise StrategyError(f"{where}: {error}") from error
    if not (isinstance(loaded, type) and issubclass(loaded, Method)):
        raise StrategyError(f"{where}: {shown(loaded)} is not a subclass of atorch's Method")
    if point.name not in METHODS or METHODS[point.name] is not loaded:
        raise StrategyError(
            f'{where}: it is not registered under that name; decorate it with @method("{point.name}", …)'
        )
    return loaded


def _package(point: EntryPoint) -> str:
    """The distribution of an entry point, as `name version`."""
    return "an unknown package" if point.dist is None else f"{point.dist.name} {point.dist.version}"
