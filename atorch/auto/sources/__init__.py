"""Sources of a plan: a Hugging Face config, a job in a file, or a transformer's shape.

A job is `FILE.py:NAME` or `package.module:NAME`. NAME is a dict of the arguments of `atorch.plan`, or a function that
returns one:

    def job(seq=8192):
        return {"model": lambda: Llama(seq), "sample_batch": tokens(seq), "loss_func": loss, "optim_func": AdamW}

A parameter `seq` is the length of a sample, which the command line may set. Loading a file runs it, as `python FILE.py`
would; its errors keep their traceback.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from atorch.auto.sources import config
from atorch.errors import ArgumentError, AtorchError, near_miss, shown

if TYPE_CHECKING:
    from atorch.auto.plan_for_cluster import Subject
    from atorch.auto.planner.plan import ClusterPlan
    from atorch.cluster.spec import ClusterSpec
    from atorch.cost.transformer import TransformerShape


ShapeOptions = Mapping[str, int | None]  # option → its value

CONFIG = "config.json"
NEEDED = ("layers", "hidden", "heads", "ffn", "vocab")
OPTIONAL = ("kv-heads", "experts", "top-k")


@dataclass(frozen=True)
class JobSource:
    """A job to plan for; `takes_seq` if its samples may have any length."""

    title: str
    takes_seq: bool
    subject: Callable[[int | None, ClusterSpec], Subject]


def source_of(named: str | None, path: Path | None, shape: ShapeOptions) -> JobSource:
    """The job to plan for.

    Raises:
        ArgumentError: no source is given, several are, or the one is invalid.
    """
    has_shape = any(value is not None for value in shape.values())
    if sum((named is not None, path is not None, has_shape)) != 1:
        raise ArgumentError(
            "give one of a config.json, a folder that has one, a job (FILE.py:NAME), or a shape (--layers, --hidden, …)"
        )
    if named is not None:
        return _of_name(named)
    return _of_config(path) if path is not None else _of_shape(shape)


def is_source(model: object) -> bool:
    """True for the name of a source, and for a config of transformers."""
    return isinstance(model, (str, PathLike)) or hasattr(type(model), "model_type")


def plan_of(model: Any, positional: Sequence[Any], cluster: Any, keywords: Mapping[str, Any]) -> ClusterPlan:
    """Carry out `plan` for a model of which `is_source` is true.

    Raises:
        ArgumentError: an unknown or invalid argument, or there is no such file or job.
    """
    from atorch.auto.arguments import meant, positioned
    from atorch.auto.plan_for_cluster import cluster_of, plan_for
    from atorch.auto.planner.request import PLAN_OPTIONS, PlanRequest

    options = {**keywords, **positioned(positional, (), keywords)}
    for name in options:
        if name not in ("seq", *PLAN_OPTIONS):
            remedy = meant(name, ("seq", *PLAN_OPTIONS))
            raise ArgumentError(
                f"a plan of {shown(model)}, which has its own batch, loss and optimizer, has no argument {name!r}; "
                f"{remedy}"
            )
    seq, spec = options.pop("seq", None), cluster_of(cluster)
    PlanRequest(**options)  # before the model is read, which may take minutes
    source = _of_name(fspath(model)) if isinstance(model, (str, PathLike)) else _of_config(model)
    return plan_for(source.subject(seq, spec), spec, **options)


def _of_name(named: str) -> JobSource:
    """The source of a name; raises ArgumentError if it is neither a config, nor a folder with one, nor a job."""
    path = Path(named)
    if path.is_dir():
        if not (path / CONFIG).is_file():
            raise ArgumentError(f"the folder {named} has no {CONFIG}; give one, or a job FILE.py:NAME")
        return _of_config(path / CONFIG)
    if path.suffix == ".json" and path.is_file():
        return _of_config(path)
    if ":" in named:
        return _of_job(named)
    if path.is_file():
        raise ArgumentError(f"{named} is a file; give {named}:NAME for a job in it, or a model's {CONFIG}")
    nearby = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    near = "".join(f"did you mean {name!r}? Else " for name in difflib.get_close_matches(path.name, nearby, n=1))
    raise ArgumentError(
        f"there is no file or folder {named!r}, and nothing is downloaded; {near}give a {CONFIG}, a folder that has "
        "one, or a job FILE.py:NAME"
    )


def _of_job(named: str) -> JobSource:
    loaded = load(named)

    def subject(seq: int | None, cluster: ClusterSpec) -> Subject:
        from atorch.auto.plan_for_cluster import subject_of

        arguments = arguments_of(loaded, named, seq)
        return subject_of(arguments.pop("model"), arguments.pop("sample_batch"), cluster, **arguments)

    return JobSource(named, takes_seq(loaded), subject)


def _of_config(path: Any) -> JobSource:
    def subject(seq: int | None, cluster: ClusterSpec) -> Subject:
        from atorch.auto.plan_for_cluster import subject_of

        arguments = config.job_of(path, seq)
        try:
            return subject_of(arguments.pop("model"), arguments.pop("sample_batch"), cluster, **arguments)
        except Exception as error:
            fault = error.__cause__ if isinstance(error, AtorchError) else error
            if fault is None:
                raise
            raise ArgumentError(
                f"the model of {path} fails on the sample that is made for it ({type(fault).__name__}: "
                f"{' '.join(str(fault).split())[:200]}); write a job (FILE.py:NAME) with a sample_batch"
            ) from error

    return JobSource(str(path), True, subject)


def _of_shape(shape: ShapeOptions) -> JobSource:
    """A decoder like Llama's, in fp32 as precision methods expect it; with `experts`, one like Mixtral's."""
    missing = [f"--{name}" for name in NEEDED if shape[name] is None]
    if missing:
        raise ArgumentError(f"a shape needs {', '.join(missing)} as well")

    def subject(seq: int | None, cluster: ClusterSpec) -> Subject:
        from atorch.auto.plan_for_cluster import Subject
        from atorch.cost.transformer import Implementation, transformer_profile

        if seq is None:
            raise ArgumentError("a shape says nothing of the length of a sample; give --seq")
        eager = Implementation(itemsize=4.0, fused_norm=False, fused_activation=False)
        return Subject(transformer_profile(_transformer(shape, seq), implementation=eager))

    sizes = ", ".join(f"{name} {value}" for name, value in shape.items() if value is not None)
    return JobSource(f"a transformer with {sizes}", True, subject)


def _transformer(shape: ShapeOptions, seq: int) -> TransformerShape:
    """The transformer of a shape; raises ArgumentError if the numbers contradict each other."""
    from atorch.cost.transformer import Experts, TransformerShape

    sizes = {name: value for name, value in shape.items() if value is not None}
    hidden, heads, ffn = sizes["hidden"], sizes["heads"], sizes["ffn"]
    kv_heads, experts, top_k = sizes.get("kv-heads", heads), sizes.get("experts"), sizes.get("top-k")
    if hidden % heads or heads % kv_heads:
        raise ArgumentError(
            f"--hidden {hidden}, --heads {heads}, --kv-heads {kv_heads}: each divides the one before it; give others"
        )
    if top_k is not None and top_k > (experts or 0):
        raise ArgumentError(f"--top-k {top_k} of {experts or 'no'} experts; give --experts, at least as many")
    return TransformerShape(
        layers=sizes["layers"],
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        ffn=ffn,
        vocab=sizes["vocab"],
        seq_len=seq,
        head_dim=hidden // heads,
        experts=None if experts is None else Experts(count=experts, top_k=top_k or min(2, experts), ffn=ffn),
    )


FORM = "a job is FILE.py:NAME, where NAME is a dict of atorch.plan's arguments or a function that returns one"
JOB_NEEDS = ("model", "sample_batch")


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
        ArgumentError: it is not a job, or takes no `seq` and one is given.
    """
    if seq is not None and not takes_seq(job):
        raise ArgumentError(
            f"--seq is given, and the job {named} takes no seq; let it be a function with a parameter seq"
        )
    arguments = job if not callable(job) else job() if seq is None else job(seq=seq)
    if not isinstance(arguments, Mapping):
        raise ArgumentError(f"the job {named} is {shown(arguments)}; {FORM}")
    missing = [name for name in JOB_NEEDS if name not in arguments]
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
