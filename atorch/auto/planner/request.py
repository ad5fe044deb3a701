"""The request of a plan for a cluster: its knobs, and the names of methods among them, checked when it is made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from atorch import trainer_configs
from atorch.auto.opt_lib.shared.defaults import SLOT as DATA_PARALLEL
from atorch.auto.strategy import METHODS, PRECISIONS, PrecisionLevel, Strategy
from atorch.cluster.spec import ClusterSpec
from atorch.cost import ModelProfile
from atorch.cost.adapted_profile import ALL_LINEAR, AdapterTarget, targets_of
from atorch.cost.memory import RESERVE
from atorch.errors import ArgumentError, StrategyError, near_miss, shown
from atorch.units import seconds_in

if TYPE_CHECKING:
    from typing_extensions import Self


Objective = Literal["step_time", "throughput", "cost", "fewest_devices"]
OBJECTIVES: tuple[str, ...] = get_args(Objective)
MAX_SIMULATED = 32
CHOICES: Mapping[str, tuple[str, ...]] = {
    "optimizer": ("adamw", "adamw8bit", "adamw_bf16", "adafactor", "muon", "sgd", "lion"),
    "dtype": ("fp32", "bf16", "fp16"),
    "attention": ("sdpa", "flash_attention_2", "eager"),
    "cross_entropy": ("chunked",),
}
RECIPE = ("lora", "qlora", "optimizer", "dtype", "attention")
"""Knobs that say how a model known by its shape is trained."""
RANK = 16
EXPERTS = "expert_parallel"
"""The method that is only for plans."""
REFUSE: Mapping[str | None, tuple[str, ...]] = {
    "adafactor": ("chunk", "fsdp", "tensor_parallel", "zero2"),
    "muon": ("chunk", "tensor_parallel"),
}
"""By optimizer, the methods that refuse it: docs/optimizers.md."""


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """The knobs of a plan for a cluster, as those of `atorch.plan`.

    Args:
        objective: "step_time" and "throughput" choose the fastest step, which is the same at a given batch. "cost":
            the least device-seconds a step, on the cluster or a part of it. "fewest_devices": the smallest part that
            fits, and the fastest there.
        lora: the rank of adapters on frozen weights, or "RANK:targets", such as "16:q,v"; by default on every
            linear layer of blocks. `qlora` freezes them in 4 bits.
        optimizer, dtype, attention: as `CHOICES` has them; of models that are known by their shape, like `lora`.
        cross_entropy: "chunked" includes the method cross_entropy.
        target: a trainer, such as "accelerate", whose configuration has to express the strategy.
        traits: how the trainer works, by default as the target's; not an argument of `atorch.plan`.
        max_step: the longest step that counts as a plan, as "2s" or "500ms", or in seconds.

    Raises:
        ArgumentError: an invalid value.
        StrategyError: an unknown method, or an invalid strategy.
    """

    global_batch: int | None = None
    excluded: Any = None  # names; a tuple once it is made
    included: Any = None
    fixed: Any = None  # a Strategy or None once it is made
    extend: Any = None
    precision: PrecisionLevel = "half"
    host_memory: bool | None = None
    objective: Objective = "step_time"
    reserve: float = RESERVE
    verify: int | None = None
    lora: Any = None
    qlora: bool = False
    optimizer: str | None = None
    dtype: str | None = None
    attention: str | None = None
    cross_entropy: str | None = None
    target: str | None = None
    max_step: Any = None  # seconds or None once it is made
    traits: trainer_configs.Traits | None = None

    def __post_init__(self) -> None:
        for name in ("excluded", "included"):
            object.__setattr__(self, name, names_in(getattr(self, name), name))
        for name in ("fixed", "extend"):
            given = getattr(self, name)
            object.__setattr__(self, name, None if given is None else Strategy.of(given))
        batch, reserve, verify = self.global_batch, self.reserve, self.verify
        if batch is not None and (not isinstance(batch, int) or not 1 <= batch <= 2**40):
            raise ArgumentError(f"global_batch is {shown(batch)}; it is the samples of a step, from 1 to {2**40:,}")
        if not isinstance(reserve, (int, float)) or not 0 <= reserve < 1:
            raise ArgumentError(
                f"reserve is {shown(reserve)}; it is the share of a device's memory to keep free, as 0.08"
            )
        if verify is not None and (not isinstance(verify, int) or not 0 <= verify <= MAX_SIMULATED):
            raise ArgumentError(f"verify is {shown(verify)}; it is how many are simulated, from 0 to {MAX_SIMULATED}")
        for name, allowed in {"objective": OBJECTIVES, "precision": PRECISIONS, **CHOICES}.items():
            value = getattr(self, name)
            if value not in allowed and (value is not None or name not in CHOICES):
                raise ArgumentError(f"{name} is {value!r}; {near_miss(str(value), allowed)}")
        object.__setattr__(self, "max_step", duration(self.max_step, "max_step", "2s"))
        if self.host_memory not in (None, True, False):
            raise ArgumentError(
                f"host_memory is {self.host_memory!r}; it is True, False, or None for where nothing fits without"
            )
        if self.adapters is not None and self.dtype == "fp32" and self.qlora:
            raise ArgumentError("qlora computes in 16 bits, and dtype is 'fp32'; leave one of them out")
        if self.cross_entropy and "cross_entropy" not in self.included:
            object.__setattr__(self, "included", (*self.included, "cross_entropy"))
        if self.target is not None:
            trainer_configs.target(self.target).check(self.recipe)
        refused = [name for name in REFUSE.get(self.optimizer, ()) if name not in self.excluded]
        object.__setattr__(self, "excluded", (*self.excluded, *refused))

    @property
    def adapters(self) -> tuple[int, frozenset[AdapterTarget]] | None:
        """Rank and targets of adapters, or None if all of the model trains."""
        if self.lora is None:
            return (RANK, ALL_LINEAR) if self.qlora else None
        rank, _, words = str(self.lora).partition(":")
        if not rank.strip().isdecimal() or int(rank) < 1:
            raise ArgumentError(f"lora is {shown(self.lora)}; it is a rank of at least 1, or RANK:targets, as '16:q,v'")
        return int(rank), targets_of(words) if words else ALL_LINEAR

    @property
    def trainer_traits(self) -> trainer_configs.Traits:
        if self.traits is not None:
            return self.traits
        return trainer_configs.target(self.target).traits if self.target else trainer_configs.Traits()

    @property
    def recipe(self) -> dict[str, Any]:
        """The knobs of `RECIPE` that are given."""
        return {name: getattr(self, name) for name in RECIPE if getattr(self, name)}

    def need_no_recipe(self, model: str) -> None:
        """Refuse knobs of `RECIPE` for a model that has them itself."""
        if self.recipe:
            raise ArgumentError(
                f"{' and '.join(self.recipe)} cannot be given for {model}, which has its own weights and optimizer; "
                "they are for a model on the Hub, a config.json, or a shape"
            )


PLAN_OPTIONS = tuple(name for name in PlanRequest.__dataclass_fields__ if name != "traits")


@dataclass(frozen=True)
class PlanJob:
    """The subject of a search: a model, a cluster, and the request with a global batch."""

    profile: ModelProfile
    cluster: ClusterSpec
    request: PlanRequest

    def with_request(self, **knobs: Any) -> Self:
        """The same job with other knobs."""
        return replace(self, request=replace(self.request, **knobs))

    @property
    def has_experts(self) -> bool:
        return self.cluster.world_size > 1 and any(segment.num_experts for segment in self.profile.segments)

    @property
    def global_batch(self) -> int:
        batch = self.request.global_batch
        return self.profile.batch_size * self.cluster.world_size if batch is None else batch


def duration(given: Any, name: str, example: str) -> float | None:
    """The seconds of a text with a unit, or of a number.

    Raises:
        ArgumentError: it is neither, or not above 0.
    """
    if given is None:
        return None
    is_number = isinstance(given, (int, float)) and not isinstance(given, bool)
    seconds = float(given) if is_number else seconds_in(given) if isinstance(given, str) else None
    if seconds is None or not 0 < seconds < 1e15:
        raise ArgumentError(
            f"{name} is {shown(given)}; give a time above 0 with its unit (ms, s, min, h, d): '{example}'"
        )
    return seconds


def others(fixed: Strategy) -> Iterable[str]:
    """Methods that are neither in `fixed` nor needed with it on several processes."""
    slots = {method.slot for method in fixed}
    completing = {"parallel_mode"} if DATA_PARALLEL in slots else {"parallel_mode", "ddp"}
    return (name for name in METHODS if name not in completing and name not in fixed.names())


def less_exact(precision: PrecisionLevel) -> tuple[str, ...]:
    """Names of the methods that train in less exact numbers."""
    allowed = PRECISIONS.index(precision)
    return tuple(name for name in METHODS if PRECISIONS.index(METHODS[name].precision_level) > allowed)


def names_in(given: Iterable[str] | None, argument: str) -> tuple[str, ...]:
    """The method names of an argument; raises StrategyError for a string or an unknown name."""
    if isinstance(given, str):
        raise StrategyError(f"{argument} is {given!r}; give a list of method names, [{given!r}]")
    if given is not None and not isinstance(given, Iterable):
        raise StrategyError(f"{argument} is {shown(given)}; give a list of method names, as ['fsdp']")
    names = tuple(given or ())
    for name in names:
        if not isinstance(name, str):
            raise StrategyError(
                f"{argument} has {shown(name)}; it takes only names of methods, as ['fsdp']. A method with its "
                "settings goes into load_strategy, where finetune_strategy=True searches the settings that are left"
            )
        METHODS[name]
    return names


def check_names(
    barred: Sequence[str], needed: Sequence[str], given: Strategy | None, *, is_whole: bool
) -> dict[str, str]:
    """Return the methods that every composition has, by slot: those of `given`, and the needed ones.

    is_whole: compositions have the methods of `given` and no others.

    Raises:
        StrategyError: names contradict each other.
    """
    held = {method.slot: method.name for method in given or ()}
    for name in needed:
        if is_whole and name not in held.values():
            raise StrategyError(f"{name} is included, but the given strategy keeps its methods; add {name} to it")
        other = held.setdefault(METHODS[name].slot, name)
        if other != name:
            raise StrategyError(f"{other} and {name} are both given, but exclude each other; give one of them")
    for name in barred:
        if name in held.values():
            what = "included" if name in needed else "given"
            raise StrategyError(f"{name} is both excluded and {what}; leave it out of one of them")
    return held
