"""Makes `smdistributed.modelparallel.torch` a name of `atorch.smp`, for scripts that import it.

    import atorch.smp.alias                              # before the script's own
    import smdistributed.modelparallel.torch as smp

or, without a change to the script, `python -m atorch.smp.alias script.py …`, and for several processes
`torchrun --nproc-per-node 4 -m atorch.smp.alias script.py …`. Nothing else installs the name.
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
"""The last version of the original with this interface; scripts read it."""
USAGE = "usage: python -m atorch.smp.alias (SCRIPT | -m MODULE) [ARGUMENTS …]"


def run(arguments: list[str]) -> None:
    """Run a script, or with `-m` a module, as Python would, with the name installed.

    Raises:
        SystemExit: there are no arguments; it prints the usage.
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
    imported = sys.modules.get(PACKAGES[0])
    if imported is not None and not hasattr(imported, "__atorch__"):
        raise ArgumentError(
            "another smdistributed has been imported; import atorch.smp.alias before everything that imports it"
        )
    for name in PACKAGES:
        package = module_from_spec(ModuleSpec(name, None, is_package=True))
        vars(package).update(__atorch__=True, __version__=VERSION)
        _name(name, package)
    _name(NAME, smp)
    # Alias every submodule: an import by the package's path would load it a second time.
    for info in pkgutil.walk_packages(smp.__path__, f"{smp.__name__}."):
        if info.name != f"{smp.__name__}.alias":
            _name(NAME + info.name.removeprefix(smp.__name__), importlib.import_module(info.name))


def _name(name: str, module: ModuleType) -> None:
    sys.modules[name] = module
    parent, _, attribute = name.rpartition(".")
    if parent in PACKAGES:
        vars(sys.modules[parent])[attribute] = module


_install()
if __name__ == "__main__":
    run(sys.argv[1:])
