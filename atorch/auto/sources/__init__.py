"""Sources of a plan: a Hugging Face config, a job in a file, or a transformer's shape."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atorch.auto.sources import config, job
from atorch.errors import ArgumentError, AtorchError, shown

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


def plan_of(model: Any, given: Sequence[Any], cluster: Any, keywords: Mapping[str, Any]) -> ClusterPlan:
    """Carry out `plan` for a model of which `is_source` is true.

    Raises:
        ArgumentError: an unknown or invalid argument, or there is no such file or job.
    """
    from atorch.auto.arguments import meant, positioned
    from atorch.auto.plan_for_cluster import cluster_of, plan_for
    from atorch.auto.planner.request import PLAN_OPTIONS, PlanRequest

    options = {**keywords, **positioned(given, (), keywords)}
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
    raise ArgumentError(
        f"there is no file or folder {named!r}, and nothing is downloaded; {_near(path.name, nearby)}give a {CONFIG}, "
        "a folder that has one, or a job FILE.py:NAME"
    )


def _near(name: str, names: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {near[0]!r}? Else " if near else ""


def _of_job(named: str) -> JobSource:
    loaded = job.load(named)

    def subject(seq: int | None, cluster: ClusterSpec) -> Subject:
        from atorch.auto.plan_for_cluster import subject_of

        arguments = job.arguments_of(loaded, named, seq)
        return subject_of(arguments.pop("model"), arguments.pop("sample_batch"), cluster, **arguments)

    return JobSource(named, job.takes_seq(loaded), subject)


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

        eager = Implementation(itemsize=4.0, fused_norm=False, fused_activation=False)
        return Subject(transformer_profile(_transformer(shape, _needed(seq, "a shape")), implementation=eager))

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


def _needed(seq: int | None, what: str) -> int:
    if seq is None:
        raise ArgumentError(f"{what} says nothing of the length of a sample; give --seq")
    return seq
