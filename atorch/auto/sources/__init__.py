"""Sources of a plan: a Hugging Face config, a job in a file, or a transformer's shape.

A model on the Hub is known by its config in the local cache, or by the catalogue of `shapes`.

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
from dataclasses import dataclass, replace
from os import PathLike, fspath
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from atorch.auto.sources import config, shapes
from atorch.cost.transformer import TransformerShape
from atorch.errors import ArgumentError, AtorchError, near_miss, shown
from atorch.logs import logger

if TYPE_CHECKING:
    from atorch.auto.plan_for_cluster import Subject
    from atorch.auto.planner.plan import ClusterPlan
    from atorch.auto.planner.request import PlanRequest
    from atorch.cluster.spec import ClusterSpec


ShapeOptions = Mapping[str, int | None]  # option → its value

CONFIG = "config.json"
DEFAULT_SEQ = 4096  # tokens of a sample of a model on the Hub
NEEDED = ("layers", "hidden", "heads", "ffn", "vocab")
OPTIONAL = ("kv-heads", "experts", "top-k", "head-dim", "tied")


@dataclass(frozen=True)
class JobSource:
    """A job to plan for; `takes_seq` if its samples may have any length."""

    title: str
    takes_seq: bool
    subject: Callable[[int | None, ClusterSpec], Subject]


def _no_subject(seq: int | None, cluster: ClusterSpec) -> Subject:
    raise ArgumentError("the catalogue has many models; name one")


CATALOGUE = JobSource("the models of the catalogue", True, _no_subject)


def source_of(named: str | None, path: Path | None, shape: ShapeOptions, request: PlanRequest) -> JobSource:
    """The job to plan for, trained as `request` says.

    Raises:
        ArgumentError: no source is given, several are, or the one is invalid.
    """
    has_shape = any(value is not None for value in shape.values())
    if sum((named is not None, path is not None, has_shape)) != 1:
        raise ArgumentError(
            "give one of a config.json, a folder that has one, a model on the Hub, a job (FILE.py:NAME), or a shape "
            "(--layers, --hidden, …)"
        )
    if named is not None:
        return _of_name(named, request)
    return _of_config(path, request) if path is not None else _of_shape(shape, request)


def is_source(model: object) -> bool:
    """True for the name of a source, a shape, a config of transformers, and None, which stands for the catalogue."""
    return model is None or isinstance(model, (str, PathLike, TransformerShape)) or hasattr(type(model), "model_type")


def plan_of(model: Any, positional: Sequence[Any], cluster: Any, keywords: Mapping[str, Any]) -> ClusterPlan:
    """Carry out `plan` for a model of which `is_source` is true.

    Raises:
        ArgumentError: an unknown or invalid argument, or there is no such file or job.
    """
    from atorch.auto.argument_names import argument_remedy, name_positional
    from atorch.auto.plan_for_cluster import cluster_of, plan_for
    from atorch.auto.planner.request import PLAN_OPTIONS, PlanRequest
    from atorch.auto.solve import solved

    options = {**keywords, **name_positional(positional, (), keywords)}
    for name in options:
        if name not in ("seq", "solve", *PLAN_OPTIONS):
            remedy = argument_remedy(name, ("seq", "solve", *PLAN_OPTIONS))
            raise ArgumentError(
                f"a plan of {shown(model)}, which has its own batch, loss and optimizer, has no argument {name!r}; "
                f"{remedy}"
            )
    seq, what, spec = options.pop("seq", None), options.pop("solve", None), cluster_of(cluster)
    request = PlanRequest(**options)  # before the model is read, which may take minutes

    def source(request: PlanRequest) -> JobSource:
        if isinstance(model, TransformerShape):
            return _of_transformer("a transformer", request, lambda seq: replace(model, seq_len=seq or model.seq_len))
        return _of_name(fspath(model), request) if isinstance(model, (str, PathLike)) else _of_config(model, request)

    if (what == "model") != (model is None):
        raise ArgumentError(
            f"solve is {what!r} and the model is {shown(model)}; only solve 'model' takes None, as model"
        )
    if what is None:
        return plan_for(source(request).subject(seq, spec), spec, request=request)
    return solved(what, source, spec, seq, request)


def _of_name(named: str, request: PlanRequest) -> JobSource:
    """The source of a name; raises ArgumentError if it is no config, folder with one, model on the Hub, or job."""
    path = Path(named)
    if path.is_dir():
        if not (path / CONFIG).is_file():
            raise ArgumentError(f"the folder {named} has no {CONFIG}; give one, or a job FILE.py:NAME")
        return _of_config(path / CONFIG, request)
    if path.suffix == ".json" and path.is_file():
        return _of_config(path, request)
    if ":" in named:
        request.need_no_recipe("a job")
        return _of_job(named)
    if path.is_file():
        raise ArgumentError(f"{named} is a file; give {named}:NAME for a job in it, or a model's {CONFIG}")
    if shapes.HUB_ID.fullmatch(named):
        cached, facts = shapes.cached_config(named), shapes.known(named)
        if cached is not None:
            return _of_config(cached, request, named)
        if facts is not None:
            return _of_facts(facts, named, request, named)
    nearby = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    near = "".join(f"did you mean {name!r}? Else " for name in difflib.get_close_matches(path.name, nearby, n=1))
    raise ArgumentError(
        f"there is no file or folder {named!r}, and no model of this name in the Hub's local cache or in atorch's "
        f"catalogue; nothing is downloaded. {near}{shapes.instead(named)}"
    )


def catalogue_of(request: PlanRequest, seq: int | None, cluster: ClusterSpec) -> list[tuple[str, Subject]]:
    """(id, subject) of each model of the catalogue that can be trained as the request says; one id of each shape."""
    from atorch.auto.plan_for_cluster import Subject

    found: dict[str, tuple[str, Subject]] = {}
    for name, facts in shapes.catalogue().items():
        if repr(facts) not in found and not ("latent" in facts and request.adapters):
            shape = shapes.shape_of(facts, seq or DEFAULT_SEQ)
            found[repr(facts)] = name, Subject(shapes.profile_of(shape, request, cluster.device), model=name)
    if seq is None:
        logger.warning("--seq is not given: %s tokens a sample", f"{DEFAULT_SEQ:,}")
    return list(found.values())


def _of_job(named: str) -> JobSource:
    loaded = load(named)

    def subject(seq: int | None, cluster: ClusterSpec) -> Subject:
        from atorch.auto.plan_for_cluster import subject_of

        arguments = arguments_of(loaded, named, seq)
        return subject_of(arguments.pop("model"), arguments.pop("sample_batch"), cluster, **arguments)

    return JobSource(named, takes_seq(loaded), subject)


def _of_config(path: Any, request: PlanRequest, named: str | None = None) -> JobSource:
    if request.recipe and isinstance(path, Path):
        return _of_facts(shapes.facts_of_config(path), named or str(path), request, named)
    request.need_no_recipe("a config of transformers")

    def subject(seq: int | None, cluster: ClusterSpec) -> Subject:
        from atorch.auto.plan_for_cluster import subject_of

        arguments = config.job_of(path, seq)
        try:
            traced = subject_of(arguments.pop("model"), arguments.pop("sample_batch"), cluster, **arguments)
            return replace(traced, model=named)
        except Exception as error:
            fault = error.__cause__ if isinstance(error, AtorchError) else error
            if fault is None:
                raise
            raise ArgumentError(
                f"the model of {path} fails on the sample that is made for it ({type(fault).__name__}: "
                f"{' '.join(str(fault).split())[:200]}); write a job (FILE.py:NAME) with a sample_batch"
            ) from error

    return JobSource(named or str(path), True, subject)


def _of_shape(shape: ShapeOptions, request: PlanRequest) -> JobSource:
    """A decoder like Llama's; with `experts`, one like Mixtral's."""
    missing = [f"--{name}" for name in NEEDED if shape[name] is None]
    if missing:
        raise ArgumentError(f"a shape needs {', '.join(missing)} as well")
    sizes = ", ".join(f"{name} {value}" for name, value in shape.items() if value is not None)
    return _of_facts(_facts(shape), f"a transformer with {sizes}", request, None, None)


def _of_facts(
    facts: Mapping[str, Any],
    title: str,
    request: PlanRequest,
    named: str | None,
    default_seq: int | None = DEFAULT_SEQ,
) -> JobSource:
    def shape(seq: int | None) -> TransformerShape:
        length = seq or default_seq
        if length is None:
            raise ArgumentError("a shape says nothing of the length of a sample; give --seq")
        if seq is None:
            logger.warning("--seq is not given: %s tokens a sample", f"{length:,}")
        return shapes.shape_of(facts, length)

    return _of_transformer(title, request, shape, named)


def _of_transformer(
    title: str, request: PlanRequest, shape: Callable[[int | None], TransformerShape], named: str | None = None
) -> JobSource:
    """A decoder in closed form, in fp32 as precision methods expect it unless the request says otherwise."""

    def subject(seq: int | None, cluster: ClusterSpec) -> Subject:
        from atorch.auto.plan_for_cluster import Subject

        return Subject(shapes.profile_of(shape(seq), request, cluster.device), model=named)

    recipe = ", ".join(name if value is True else f"{name} {value}" for name, value in request.recipe.items())
    return JobSource(f"{title}, {recipe}" if recipe else title, True, subject)


def _facts(shape: ShapeOptions) -> dict[str, Any]:
    """Fields of the transformer of a shape; raises ArgumentError if the numbers contradict each other."""
    sizes = {name: value for name, value in shape.items() if value is not None}
    hidden, heads, ffn = sizes["hidden"], sizes["heads"], sizes["ffn"]
    kv_heads, experts, top_k = sizes.get("kv-heads", heads), sizes.get("experts"), sizes.get("top-k")
    head_dim = sizes.get("head-dim") or (0 if hidden % heads else hidden // heads)
    if not head_dim or heads % kv_heads:
        raise ArgumentError(
            f"--hidden {hidden}, --heads {heads}, --kv-heads {kv_heads}: each divides the one before it; give others"
        )
    if top_k is not None and top_k > (experts or 0):
        raise ArgumentError(f"--top-k {top_k} of {experts or 'no'} experts; give --experts, at least as many")
    mixture = {"count": experts, "top_k": top_k or min(2, experts), "ffn": ffn} if experts else None
    return {
        **{name: sizes[name] for name in NEEDED},
        **{"kv_heads": kv_heads, "head_dim": head_dim, "tied": bool(sizes.get("tied"))},
        **({"experts": mixture} if mixture else {}),
    }


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
