"""A job named on the command line, `FILE.py:NAME` or `package.module:NAME`: the arguments of `atorch.plan`.

NAME is a dict of these arguments, or a function that returns one:

    def job(seq=8192):
        return {"model": lambda: Llama(seq), "sample_batch": tokens(seq), "loss_func": loss, "optim_func": AdamW}

A parameter `seq` is the length of a sample, which the command line may set. Loading a file runs it, as `python FILE.py`
would; its errors keep their traceback.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from atorch.errors import ArgumentError, near_miss, shown

FORM = "a job is FILE.py:NAME, where NAME is a dict of atorch.plan's arguments or a function that returns one"
NEEDED = ("model", "sample_batch")


def load(named: str) -> Any:
    """The object that `FILE.py:NAME` or `package.module:NAME` names.

    Raises:
        ArgumentError: there is no such file, module or name.
    """
    home, colon, name = named.rpartition(":")
    if not colon or not home or not name:
        raise ArgumentError(f"the job is {named!r}; {FORM}")
    module = _module_of(home)
    if not hasattr(module, name):
        names = [attribute for attribute in vars(module) if not attribute.startswith("_")]
        raise ArgumentError(f"{home} has no {name!r}; {near_miss(name, names)}")
    return getattr(module, name)


def takes_seq(job: Any) -> bool:
    return callable(job) and "seq" in inspect.signature(job).parameters


def arguments_of(job: Any, named: str, seq: int | None) -> dict[str, Any]:
    """The arguments of the job for `atorch.plan`.

    Raises:
        ArgumentError: it is no job, or takes no `seq` and one is given.
    """
    if seq is not None and not takes_seq(job):
        raise ArgumentError(
            f"--seq is given, and the job {named} takes no seq; let it be a function with a parameter seq"
        )
    arguments = job if not callable(job) else job() if seq is None else job(seq=seq)
    if not isinstance(arguments, Mapping):
        raise ArgumentError(f"the job {named} is {shown(arguments)}; {FORM}")
    missing = [name for name in NEEDED if name not in arguments]
    if missing:
        raise ArgumentError(f"the job {named} has no {' and no '.join(missing)}; {FORM}")
    return dict(arguments)


def _module_of(home: str) -> ModuleType:
    if not home.endswith(".py"):
        if importlib.util.find_spec(home.partition(".")[0]) is None:
            raise ArgumentError(f"there is no module {home!r}; {FORM}")
        return importlib.import_module(home)
    path = Path(home)
    if not path.is_file():
        raise ArgumentError(f"there is no file {home!r}; {FORM}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None  # of a name that ends in .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.absolute().parent))  # for imports of its neighbours, as for a script
    sys.modules[path.stem] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
