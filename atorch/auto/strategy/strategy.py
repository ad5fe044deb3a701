"""A strategy: an ordered set of methods, checked when it is built."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from html import escape
from os import PathLike
from typing import TYPE_CHECKING, Any, TypeVar, overload

from atorch.auto.strategy.method import METHODS, Method, PrecisionLevel
from atorch.errors import StrategyError, shown
from atorch.files import write

if TYPE_CHECKING:
    from torch import nn

    from atorch.auto.context import Context
    from atorch.cost import Cost

M = TypeVar("M", bound=Method)


@dataclass(frozen=True, repr=False)
class Strategy(Sequence[Method]):
    """Methods in phase order, at most one per slot. Two strategies are equal if their methods are.

    `metadata` records the strategy's origin as plain JSON data: versions, world size, cluster, model fingerprint, and
    the figures of the search.
    """

    methods: tuple[Method, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        name_of_slot: dict[str, str] = {}
        for index, method in enumerate(self.methods):
            if not isinstance(method, Method):
                raise StrategyError(
                    f"a strategy holds methods; {shown(method)} is none. Build one with Strategy.of([...])", (index,)
                )
            if not method.name:
                name = type(method).__name__
                raise StrategyError(f"{name} is not registered; decorate it with @method(...)", (index,))
            if method.slot in name_of_slot:
                other = name_of_slot[method.slot]
                twice = (
                    f"{method.name} is given twice"
                    if other == method.name
                    else f"{other} and {method.name} exclude each other"
                )
                raise StrategyError(f"{twice}: a strategy has one {method.slot}. Leave one out", (index,))
            name_of_slot[method.slot] = method.name
        object.__setattr__(self, "methods", tuple(sorted(self.methods, key=lambda method: (method.phase, method.name))))

    @classmethod
    def of(cls, source: Any) -> Strategy:
        """A strategy from any form that users write.

        Takes a Strategy; a list of names, `(name, config)` pairs and Methods; JSON as bytes or as a string that
        starts with `[` or `{`. Any other string or path names a strategy file.

        Raises:
            StrategyError: an invalid item, with its place.
        """
        from atorch.auto.strategy import codec

        if isinstance(source, Strategy):
            return source
        if isinstance(source, (str, bytes, PathLike)):
            return codec.read(source)
        if isinstance(source, Iterable) and not isinstance(source, (Mapping, bytearray, memoryview)):
            return codec.strategy_of(list(source))
        if isinstance(source, Mapping):
            remedy = "its path, or json.dumps of it" if "methods" in source else f"a list: {shown([*source.items()])}"
            raise StrategyError(f"a strategy cannot be made of {type(source).__name__} {shown(source)}; give {remedy}")
        raise StrategyError(
            f"a strategy cannot be made of {type(source).__name__} {shown(source)}; give a list of method names and "
            "(name, config) pairs, JSON, the path of a strategy file, or a Strategy"
        )

    def to_json(self) -> str:
        """The text of the strategy's file; `Strategy.of` reads it back.

        Raises:
            StrategyError: a knob or the metadata is not valid JSON, or exceeds the limits of a file.
        """
        from atorch.auto.strategy import codec

        return codec.to_json(self)

    def to_list(self) -> list[Any]:
        """Method names, and pairs of a name and the knobs that were set; `Strategy.of` reads them back.

        Raises:
            StrategyError: a knob is not valid JSON.
        """
        from atorch.auto.strategy import codec

        return codec.to_list(self)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the strategy's file atomically: a reader sees the old file or the new one. One process calls this.

        Raises:
            StrategyError: as `to_json`, or the path cannot be written to.
        """
        from atorch.auto.strategy import codec

        write(path, self.to_json(), codec.FORMAT)

    @property
    def report(self) -> Any:
        """The search's report on this strategy as plain data; None if no search was made."""
        return self.metadata.get("report")

    @overload
    def __getitem__(self, index: int) -> Method: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Method]: ...
    def __getitem__(self, index: int | slice) -> Method | Sequence[Method]:
        return self.methods[index]

    def __len__(self) -> int:
        return len(self.methods)

    def __bool__(self) -> bool:
        """True: plain training, which has no methods, is a strategy too."""
        return True

    def __iter__(self) -> Iterator[Method]:
        return iter(self.methods)

    def __contains__(self, item: object) -> bool:
        """True if a method, or one of that name, is in the strategy."""
        return item in self.methods or item in self.names()

    def names(self) -> tuple[str, ...]:
        """The methods' names, in order."""
        return tuple(method.name for method in self.methods)

    def splits_over(self, axis: str) -> bool:
        """True if a method of the strategy splits the model over this axis of the mesh."""
        return any(axis in method.splits for method in self.methods)

    @property
    def num_parameter_shards(self) -> int:
        """Parts of the parameters, of which a process starts with one; 1 if a method needs whole values first."""
        if any(method.needs_values for method in self.methods):
            return 1
        axes = {axis for method in self.methods for axis in method.shards_parameters}
        slices = [size for method in self.methods for axis, size in getattr(method, "slices", ()) if axis in axes]
        return math.prod(slices)

    def uses(self, precision_level: PrecisionLevel) -> bool:
        """True if a method of the strategy trains in this number format."""
        return any(method.precision_level == precision_level for method in self.methods)

    def get(self, kind: type[M]) -> M | None:
        """The strategy's method of class `kind`."""
        return next((method for method in self.methods if isinstance(method, kind)), None)

    def with_method(self, new: Any) -> Strategy:
        """This strategy with `new`, a method or any item for one, in its slot.

        Raises:
            StrategyError: `new` is not a method.
        """
        added = Strategy.of([new]).methods
        slots = {method.slot for method in added}
        return Strategy((*(method for method in self.methods if method.slot not in slots), *added), self.metadata)

    def without(self, name: str) -> Strategy:
        """This strategy without the method `name`."""
        METHODS[name]
        return Strategy(tuple(method for method in self.methods if method.name != name), self.metadata)

    def settled(self, model: nn.Module) -> Strategy:
        """This strategy for `model`: names in place of functions and modules, so that it can be saved.

        Raises:
            StrategyError: a method does not fit this model.
        """
        methods = tuple(method.settled(model) for method in self.methods)
        unchanged = all(one is other for one, other in zip(methods, self.methods, strict=True))
        return self if unchanged else Strategy(methods, self.metadata)

    def cost(self, cost: Cost) -> Cost:
        """The cost with all methods, applied in order."""
        return reduce(lambda folded, method: method.cost(folded), self.methods, cost)

    def apply(self, ctx: Context) -> Context:
        """The context with all methods applied in order. All processes call this together.

        Raises:
            ArgumentError: the processes have different strategies or models; nothing was changed.
            StrategyError: a method cannot be applied. Nothing was changed unless the fault shows only when the model
                runs.
        """
        from atorch.distributed.collectives import call_on_all_ranks
        from atorch.distributed.fingerprints import Fact, facts_of_model

        own = {"the strategy": Fact(f"[{self}]")}
        call_on_all_ranks(
            "Strategy.apply", lambda: {"strategy": own, **facts_of_model(ctx.root)}, lambda: self.check(ctx)
        )
        self.check_optimizer(ctx)
        return reduce(lambda folded, method: method.apply(folded), self.methods, replace(ctx, strategy=self))

    def check(self, ctx: Context) -> None:
        """Raise the errors of `apply` that are known before anything is changed: see `Method.check`."""
        ctx = replace(ctx, strategy=self)
        for method in self.methods:
            for name in self.names():
                if name in method.exclusions:
                    raise StrategyError(f"{method.name} and {name} exclude each other: {method.exclusions[name]}")
            method.check(ctx)

    def check_at_work(self, ctx: Context) -> None:
        """As `check`, and also for faults that show only when the model runs on `ctx.sample_batch`."""
        self.check(ctx)
        ctx = replace(ctx, strategy=self)
        for method in self.methods:
            method.check_at_work(ctx)

    def check_optimizer(self, ctx: Context) -> None:
        """As `check`, for the computation of the user's optimizer. All processes call this together."""
        ctx = replace(ctx, strategy=self)
        for method in self.methods:
            method.check_optimizer(ctx)

    def __repr__(self) -> str:
        return f"<Strategy {self}>"

    def _repr_html_(self) -> str:
        return " + ".join(f"<code>{escape(str(method))}</code>" for method in self.methods) or "plain"

    def __str__(self) -> str:
        return " + ".join(map(str, self.methods)) or "plain"
