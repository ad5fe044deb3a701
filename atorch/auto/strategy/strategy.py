"""A strategy: an ordered, valid set of methods. Building one is what checks it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from os import PathLike
from typing import TYPE_CHECKING, Any, TypeVar, overload

from atorch.auto.strategy.method import METHODS, Method
from atorch.errors import StrategyError, shown

if TYPE_CHECKING:
    from torch import nn

    from atorch.auto.context import Context
    from atorch.cost import Cost
    from atorch.distributed.fingerprints import Facts

M = TypeVar("M", bound=Method)


@dataclass(frozen=True)
class Strategy(Sequence[Method]):
    """Methods in phase order, at most one a slot. Two strategies are equal where their methods are.

    `metadata` says where the strategy comes from: versions, world size, cluster, model fingerprint, and the
    figures it was chosen by, as plain JSON data.
    """

    methods: tuple[Method, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        held: dict[str, str] = {}
        for index, each in enumerate(self.methods):
            if not isinstance(each, Method):
                raise StrategyError(
                    f"a strategy holds methods; {shown(each)} is none. Build one with Strategy.of([...])", (index,)
                )
            if not each.name:
                name = type(each).__name__
                raise StrategyError(f"{name} is not registered; decorate it with @method(...)", (index,))
            if each.slot in held:
                other = held[each.slot]
                twice = (
                    f"{each.name} is given twice"
                    if other == each.name
                    else f"{other} and {each.name} exclude each other"
                )
                raise StrategyError(f"{twice}: a strategy has one {each.slot}. Leave one out", (index,))
            held[each.slot] = each.name
        object.__setattr__(self, "methods", tuple(sorted(self.methods, key=lambda each: (each.phase, each.name))))

    @classmethod
    def of(cls, source: Any) -> Strategy:
        """A strategy from what users write.

        Takes a Strategy; a list of names, `(name, config)` pairs and Methods; JSON as bytes or as a string that
        starts with `[` or `{`; any other string (or a path) names a strategy file.

        Raises:
            StrategyError: whatever does not hold, with its place.
        """
        from atorch.auto.strategy import codec, items

        if isinstance(source, Strategy):
            return source
        if isinstance(source, (str, bytes, PathLike)):
            return codec.read(source)
        if isinstance(source, Iterable) and not isinstance(source, (Mapping, bytearray, memoryview)):
            return items.strategy_of(list(source))
        if isinstance(source, Mapping):
            meant = "its path, or json.dumps of it" if "methods" in source else f"a list: {shown([*source.items()])}"
            raise StrategyError(f"a strategy cannot be made of {type(source).__name__} {shown(source)}; give {meant}")
        raise StrategyError(
            f"a strategy cannot be made of {type(source).__name__} {shown(source)}; give a list of method names and "
            "(name, config) pairs, JSON, the path of a strategy file, or a Strategy"
        )

    def to_json(self) -> str:
        """The text of the strategy's file; `Strategy.of` reads it back.

        Raises:
            StrategyError: a knob or the metadata holds what JSON does not.
        """
        from atorch.auto.strategy import codec

        return codec.to_json(self)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the strategy's file, all of it or none; of several processes, one calls this.

        Raises:
            StrategyError: as `to_json`, or the path cannot be written to.
        """
        from atorch.auto.strategy import codec

        codec.save(self, path)

    @property
    def report(self) -> Any:
        """The search's account of why this strategy, as plain data; None where no search was made."""
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
        """True: plain training, of no methods, is a strategy too."""
        return True

    def __iter__(self) -> Iterator[Method]:
        return iter(self.methods)

    def __contains__(self, item: object) -> bool:
        """True if a method, or one of that name, is in the strategy."""
        return item in self.methods or item in self.names()

    def names(self) -> tuple[str, ...]:
        """The methods' names, in order."""
        return tuple(each.name for each in self.methods)

    def get(self, kind: type[M]) -> M | None:
        """The strategy's method of class `kind`."""
        return next((each for each in self.methods if isinstance(each, kind)), None)

    def with_method(self, new: Any) -> Strategy:
        """This strategy with `new`, a method or whatever a list may hold for one, in its slot.

        Raises:
            StrategyError: it is no method.
        """
        added = Strategy.of([new]).methods
        slots = {each.slot for each in added}
        return Strategy((*(each for each in self.methods if each.slot not in slots), *added), self.metadata)

    def without(self, name: str) -> Strategy:
        """This strategy without the method `name`."""
        METHODS[name]
        return Strategy(tuple(each for each in self.methods if each.name != name), self.metadata)

    def settled(self, model: nn.Module) -> Strategy:
        """This strategy for `model`: names in place of functions and modules, so that a file can hold it.

        Raises:
            StrategyError: a method cannot be meant for this model.
        """
        methods = tuple(each.settled(model) for each in self.methods)
        unchanged = all(one is other for one, other in zip(methods, self.methods, strict=True))
        return self if unchanged else Strategy(methods, self.metadata)

    def cost(self, cost: Cost) -> Cost:
        """Fold the methods' costs."""
        return reduce(lambda folded, each: each.cost(folded), self.methods, cost)

    def apply(self, ctx: Context) -> Context:
        """Fold the methods' application: the context they make of `ctx`. All processes call it together.

        Raises:
            ArgumentError: the processes have different strategies, or models; nothing was touched.
            StrategyError: a method that cannot be applied; nothing was touched where `check` knows of it, and that is
                whatever does not come out only when the model is watched at work.
        """
        from atorch.distributed.collectives import agreed

        agreed("Strategy.apply", lambda: self._facts(ctx), lambda: self.check(ctx))
        self.check_optimizer(ctx)
        return reduce(lambda folded, each: each.apply(folded), self.methods, replace(ctx, strategy=self))

    def _facts(self, ctx: Context) -> Mapping[str, Facts]:
        """Facts that must be equal on all processes."""
        from atorch.distributed.fingerprints import Fact, described_model

        return {"strategy": {"the strategy": Fact(f"[{self}]")}, **described_model(ctx.root)}

    def check(self, ctx: Context) -> None:
        """Raise what `apply` would, as far as that is known before anything is touched: see `Method.check`."""
        ctx = replace(ctx, strategy=self)
        for each in self.methods:
            each.check(ctx)

    def check_at_work(self, ctx: Context) -> None:
        """As `check`, and besides for what shows when the model is watched on `ctx.sample_batch`."""
        self.check(ctx)
        ctx = replace(ctx, strategy=self)
        for each in self.methods:
            each.check_at_work(ctx)

    def check_optimizer(self, ctx: Context) -> None:
        """As `check`, for what the user's optimizer would compute; all processes call it, for they try it together."""
        ctx = replace(ctx, strategy=self)
        for each in self.methods:
            each.check_optimizer(ctx)

    def __str__(self) -> str:
        return " + ".join(map(str, self.methods)) or "plain"
