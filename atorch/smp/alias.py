"""Makes `smdistributed.modelparallel.torch` a name of `atorch.smp`, for scripts that import it.

    import atorch.smp.alias                              # before the script's own
    import smdistributed.modelparallel.torch as smp

or, without a change to the script, `python -m atorch.smp.alias script.py …`, and for several processes
`torchrun --nproc-per-node 4 -m atorch.smp.alias script.py …`. Nothing else makes the name.
"""

from __future__ import annotations

import importlib
import pkgutil
import runpy
import sys
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType

from atorch import smp
from atorch.errors import ArgumentError

PACKAGES = ("smdistributed", "smdistributed.modelparallel")
NAME = "smdistributed.modelparallel.torch"
VERSION = "1.15.0"
"""The last one of the original whose interface this is; scripts ask for it."""
USAGE = "usage: python -m atorch.smp.alias (SCRIPT | -m MODULE) [ARGUMENTS …]"


def run(arguments: list[str]) -> None:
    """Run a script, or with `-m` a module, as Python would, but that it finds the name.

    Raises:
        SystemExit: there are no arguments; how it is used.
    """
    is_module = arguments[:1] == ["-m"]
    arguments = arguments[is_module:]
    if not arguments:
        sys.exit(USAGE)
    sys.argv[:] = arguments
    if is_module:
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(arguments[0]).resolve().parent)
        runpy.run_path(arguments[0], run_name="__main__")


def _install() -> None:
    known = sys.modules.get(PACKAGES[0])
    if known is not None and not hasattr(known, "__atorch__"):
        raise ArgumentError(
            "another smdistributed has been imported; import atorch.smp.alias before everything that imports it"
        )
    for name in PACKAGES:
        package = module_from_spec(ModuleSpec(name, None, is_package=True))
        vars(package).update(__atorch__=True, __version__=VERSION)
        _name(name, package)
    _name(NAME, smp)
    # All of them: one that were missing would be found by the package's path, and be loaded a second time.
    for found in pkgutil.walk_packages(smp.__path__, f"{smp.__name__}."):
        if found.name != f"{smp.__name__}.alias":
            _name(NAME + found.name.removeprefix(smp.__name__), importlib.import_module(found.name))


def _name(name: str, module: ModuleType) -> None:
    sys.modules[name] = module
    parent, _, own = name.rpartition(".")
    if parent in PACKAGES:
        vars(sys.modules[parent])[own] = module


_install()
if __name__ == "__main__":
    run(sys.argv[1:])
