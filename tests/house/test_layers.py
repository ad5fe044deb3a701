"""Imports go down only. A module's layer is that of the longest prefix of its name in the table.

The entry "atorch" is for the package's own file alone: whatever is put beside it has a layer of its own.
"""

from functools import cache
from graphlib import CycleError, TopologicalSorter

from tests.house.source import Import, Module, imports, modules

LAYERS = {
    "atorch.cli": 7,
    "atorch.__main__": 7,
    "atorch": 6,  # the public names, drawn from the front doors
    "atorch.auto": 6,  # accelerate, and what it is made of
    "atorch.smp": 6,
    "atorch.patrickstar": 6,
    "atorch.auto.planner": 5,
    "atorch.auto.sources.shapes": 5,
    "atorch.trainer_configs": 5,
    "atorch.auto.opt_lib": 4,
    "atorch.auto.strategy": 3,
    "atorch.auto.context": 3,
    "atorch.auto.verification": 3,
    "atorch.auto.reference_step": 3,
    "atorch.compat": 3,
    "atorch.runtime": 2,
    "atorch.profiler": 2,
    "atorch.report": 2,
    "atorch.checkpoint": 1,
    "atorch.model": 1,
    "atorch.distributed": 1,
    "atorch.cluster": 1,
    "atorch.cost": 1,
    "atorch.errors": 0,
    "atorch.files": 0,
    "atorch.registry": 0,
    "atorch.units": 0,
    "atorch.logs": 0,
}
SIBLINGS = {"atorch.runtime", "atorch.profiler", "atorch.report"}

PACKAGE = modules("atorch")
KNOWN = frozenset(module.name for module in PACKAGE)


def place(name: str) -> str | None:
    """The entry of the table that `name` belongs to."""
    prefixes = [entry for entry in LAYERS if name == entry or (entry != "atorch" and name.startswith(f"{entry}."))]
    return max(prefixes, key=len, default=None)


@cache
def own_imports(module: Module) -> list[Import]:
    """The imports of this package in `module`."""
    return [found for found in imports(module, KNOWN) if found.target.split(".")[0] == "atorch"]


def closes_no_cycle(module: Module, found: Import) -> bool:
    """Whether an import may point back: for types alone, or inside a function to a neighbour in the same package."""
    package = module.name if module.path.endswith("__init__.py") else module.name.rpartition(".")[0]
    is_neighbour = found.target == package or found.target.rpartition(".")[0] == package
    return found.is_for_types or (found.is_deferred and is_neighbour)


def test_every_module_has_a_layer():
    homeless = [module.path for module in PACKAGE if place(module.name) is None]
    assert not homeless, "say in LAYERS, and in the architecture page, where these live"


def test_imports_go_down_only():
    upward = []
    for module in PACKAGE:
        for found in own_imports(module):
            here, there = place(module.name), place(found.target)
            if here and there and LAYERS[there] > LAYERS[here]:
                upward.append(f"{module.path}:{found.line}: {here} ({LAYERS[here]}) imports {there} ({LAYERS[there]})")
    assert not upward, "\n".join(upward)


def test_mechanisms_do_not_know_each_other():
    mixed = [
        f"{module.path}:{found.line}: {module.name} imports {found.target}"
        for module in PACKAGE
        for found in own_imports(module)
        if {place(module.name), place(found.target)} <= SIBLINGS and place(module.name) != place(found.target)
    ]
    assert not mixed, "\n".join(mixed)


def test_no_import_cycle():
    graph = {
        module.name: {found.target for found in own_imports(module) if not closes_no_cycle(module, found)}
        for module in PACKAGE
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(" → ".join(error.args[1])) from None


def test_arithmetic_imports_no_torch():
    heavy = [
        f"{module.path}:{found.line}"
        for module in PACKAGE
        if place(module.name) == "atorch.cost"
        for found in imports(module, KNOWN)
        if found.target.split(".")[0] == "torch"
    ]
    assert not heavy, "\n".join(heavy)


def test_imports_are_read_as_they_are_meant():
    """Relative ones, those that only types need, and those inside functions."""
    text = (
        "from __future__ import annotations\n"
        "from typing import TYPE_CHECKING\n"
        "from . import mesh\n"
        "from ..auto.context import Context\n"
        "if TYPE_CHECKING:\n    import atorch.cli\n"
        "def late():\n    from atorch.cost import state\n"
    )
    module = Module("atorch/distributed/world.py", text)
    known = frozenset({"atorch.distributed.mesh", "atorch.auto.context", "atorch.cost.state"})
    found = {(i.target, i.is_for_types, i.is_deferred) for i in imports(module, known) if i.target.startswith("atorch")}
    assert found == {
        ("atorch.distributed.mesh", False, False),
        ("atorch.auto.context", False, False),
        ("atorch.cli", True, False),
        ("atorch.cost.state", False, True),
    }
    assert place("atorch.auto.opt_lib.ddp") == "atorch.auto.opt_lib"
    assert place("atorch.stray") is None
