"""Methods from other packages: found by entry point, loaded on the user's request.

A package offers a method in its pyproject.toml:

    [project.entry-points."atorch.methods"]
    ema = "atorch_ema:Ema"

An entry point is code. So atorch loads none because it is installed or because a strategy file names it. A script calls
`atorch.load_methods("ema")` first; after that "ema" is a name like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points

from atorch.auto.strategy.method import METHODS, Method
from atorch.errors import CapabilityError, StrategyError, near_miss, shown

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
