"""module_replace: modules of the model replaced by faster ones that compute the same.

Attention written out step by step becomes `scaled_dot_product_attention`, which saves no (queries × keys) weights for
backward. RMSNorm becomes one operation that saves only its input. Users add replacements:

register_replace_pair("my_norm", supported_dtypes={torch.float32}, pair_cls=(SlowNorm, FastNorm))

@register_replace_pair("my_norm")
class FastNorm(SlowNorm):
    def __init__(self, src_module): ...
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, overload

from pydantic import field_validator
from typing_extensions import Self

from atorch.auto.opt_lib.shared.precision import compute_dtype
from atorch.auto.strategy.method import Method, Phase, method
from atorch.cluster.spec import ClusterSpec
from atorch.cost import Cost, ModelProfile
from atorch.errors import CapabilityError, StrategyError
from atorch.logs import logger
from atorch.registry import Registry

if TYPE_CHECKING:
    import torch
    from torch import nn

    from atorch.auto.context import Context
    from atorch.model.module_swap import SwapReport

C = TypeVar("C", bound="type[nn.Module]")


class Replace(Protocol):
    """Replaces modules of a model that will run on `device`; `config` comes from the strategy."""

    def __call__(self, model: nn.Module, device: torch.device, config: Mapping[str, Any]) -> SwapReport: ...


@dataclass(frozen=True, slots=True)
class Replacement:
    """One entry: the function, its compute dtypes, and `by_default` if it runs without being named."""

    replace: Replace
    supported_dtypes: frozenset[torch.dtype] | None = None  # None: fp32, fp16 and bf16
    by_default: bool = True
    takes_config: bool = False
    fuses_attention: bool = False
    package: str | None = None  # that it needs; without it nothing is replaced


REPLACEMENTS: Registry[Replacement] = Registry("replacement")


def all_dtypes() -> frozenset[torch.dtype]:
    import torch

    return frozenset({torch.float32, torch.float16, torch.bfloat16})


@overload
def register_replace_pair(
    pair_name: str,
    supported_dtypes: Collection[torch.dtype] | None = ...,
    pair_cls: None = ...,
    *,
    match_subclasses: bool = ...,
    **kwargs: Any,
) -> Callable[[C], C]: ...
@overload
def register_replace_pair(
    pair_name: str,
    supported_dtypes: Collection[torch.dtype] | None = ...,
    *,
    pair_cls: tuple[type[nn.Module], type[nn.Module]],
    match_subclasses: bool = ...,
    **kwargs: Any,
) -> None: ...
def register_replace_pair(
    pair_name: str,
    supported_dtypes: Collection[torch.dtype] | None = None,
    pair_cls: tuple[type[nn.Module], type[nn.Module]] | None = None,
    *,
    match_subclasses: bool = False,
    **kwargs: Any,
) -> Callable[[C], C] | None:
    """Let `module_replace` replace modules of one class by another, under `pair_name`.

    `pair_cls` is (source class, replacement). Without it, this is a decorator on the replacement, whose source is its
    `_src_module_cls` or else its first base class. The replacement is constructed as
    `replacement(src_module=module, **kwargs)`; a strategy's configuration of the pair overrides `kwargs`. Parameters
    and buffers with the name and shape of one of the source are then replaced by the source's own objects.

    Only modules of exactly the source class are replaced, with `match_subclasses` those of its subclasses too. The
    model must compute in one of `supported_dtypes`, by default fp32, fp16 and bf16.

    Raises:
        StrategyError: the pair is invalid, or the replacement's constructor takes no `src_module`.
        ValueError: the name is taken.
    """
    from torch import nn

    if pair_name in ("pairs", "verbose"):
        raise StrategyError(f"module_replace uses {pair_name!r} itself; give the pair another name")
    dtypes = all_dtypes() if supported_dtypes is None else frozenset(supported_dtypes)
    if not dtypes or not dtypes <= all_dtypes():
        allowed, requested = (", ".join(sorted(map(str, group))) for group in (all_dtypes(), dtypes))
        raise StrategyError(f"replacement {pair_name!r} supports {requested or 'no dtype'}; give some of {allowed}")

    def add(source: type[nn.Module], target: type[nn.Module]) -> None:
        _check_pair(pair_name, source, target)
        replace = _ClassPair(source, target, match_subclasses, kwargs)
        REPLACEMENTS.add(pair_name, Replacement(replace, dtypes, takes_config=True))

    if pair_cls is not None:
        if not isinstance(pair_cls, (tuple, list)) or len(pair_cls) != 2:
            raise StrategyError(
                f"replacement {pair_name!r} was given pair_cls={pair_cls!r}; give (source, replacement)"
            )
        add(*pair_cls)
        return None

    def decorate(target: C) -> C:
        source = vars(target).get("_src_module_cls", target.__bases__[0])
        if source is nn.Module:
            raise StrategyError(
                f"{target.__name__} does not say what it replaces; derive it from that class, or set _src_module_cls"
            )
        add(source, target)
        return target

    return decorate


def _check_pair(name: str, source: Any, target: Any) -> None:
    from torch import nn

    for cls in (source, target):
        if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
            raise StrategyError(f"replacement {name!r} has {cls!r}, which is not a module class")
    parameters = inspect.signature(target).parameters.values()
    if not any(parameter.name == "src_module" or parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        raise StrategyError(
            f"the constructor of {target.__name__} takes no src_module; it is called as "
            f"{target.__name__}(src_module=the {source.__name__} to replace)"
        )


@dataclass(frozen=True, slots=True)
class _ClassPair:
    """Replaces modules of one class by another that is built from them."""

    source: type[nn.Module]
    target: type[nn.Module]
    match_subclasses: bool
    kwargs: Mapping[str, Any]

    def __call__(self, model: nn.Module, device: torch.device, config: Mapping[str, Any]) -> SwapReport:
        from atorch.model.module_swap import adopt_state, swap_candidates

        def build(name: str, module: nn.Module) -> nn.Module:
            made = self.target(src_module=module, **{**self.kwargs, **config})
            if module not in set(made.modules()):
                adopt_state(made, module)
            return made

        return swap_candidates(model, self._matches, build)

    def _matches(self, module: nn.Module) -> bool:
        if self.match_subclasses:
            return isinstance(module, self.source) and not isinstance(module, self.target)
        return type(module) is self.source


def _attention() -> Any:
    from atorch.runtime.fused import attention

    return attention


def _fused() -> Any:
    from atorch.runtime import fused

    return fused


REPLACEMENTS.add(
    "attention_sdpa", Replacement(lambda model, device, config: _attention().use_sdpa(model), fuses_attention=True)
)
REPLACEMENTS.add(
    "multihead_attention_sdpa",
    Replacement(lambda model, device, config: _attention().fuse_multihead_attention(model), fuses_attention=True),
)
REPLACEMENTS.add("rms_norm_fused", Replacement(lambda model, device, config: _fused().fuse_rms_norms(model)))
REPLACEMENTS.add(
    "layer_norm_apex",
    Replacement(lambda model, device, config: _fused().fuse_layer_norms(model, device), package="apex.normalization"),
)
REPLACEMENTS.add(
    "cross_entropy_liger",
    Replacement(
        lambda model, device, config: _fused().fuse_cross_entropy(model, device),
        by_default=False,
        package="liger_kernel.transformers.cross_entropy",
    ),
)


@method("module_replace", phase=Phase.MODULE)
class ModuleReplace(Method):
    """Replace modules by optimized ones."""

    pairs: dict[str, dict[str, Any] | None] | None = None
    """Replacements by name, each with its configuration or None; None: all that are enabled by default."""
    verbose: bool = False
    """Log every replaced module, and every kept one with the reason; otherwise one line per replacement."""

    @classmethod
    def of(cls, config: Any = None) -> Self:
        """Accept the documented `{pair_name: configuration or None, …, "verbose": bool}`, too."""
        if isinstance(config, Mapping) and "pairs" not in config:
            pairs = {name: knobs for name, knobs in config.items() if name != "verbose"}
            config = {"pairs": pairs or None, "verbose": config.get("verbose", False)}
        return super().of(config)

    @field_validator("pairs", mode="before")
    @classmethod
    def _known(cls, pairs: Any) -> Any:
        for name, knobs in pairs.items() if isinstance(pairs, Mapping) else ():
            takes_config = REPLACEMENTS[name].takes_config
            if knobs and not takes_config:
                raise ValueError(f"replacement {name!r} has no configuration; give None")
        return pairs

    def unmet(self, cluster: ClusterSpec) -> str | None:
        """Raise CapabilityError if the package of a named replacement is missing; all hardware is suitable."""
        for name in self.pairs or {}:
            package = REPLACEMENTS[name].package
            if package is not None and cluster.device.type == "cuda" and not _installed(package):
                raise CapabilityError(
                    f"module_replace names {name}, which needs {package.partition('.')[0]}, and it is not installed; "
                    "install flash-attn or liger-kernel with pip, apex from NVIDIA's repository, or leave that "
                    "replacement out"
                )
        return None

    def cost(self, cost: Cost) -> Cost:
        """Attention weights that are not saved, and a tenth less traffic and launches (empirical)."""
        chosen = [REPLACEMENTS[name] for name in self._chosen()]
        fuses = cost.attention == "replaceable" and any(replacement.fuses_attention for replacement in chosen)
        may_fuse = cost.attention == "written" and any(replacement.takes_config for replacement in chosen)  # user pair
        return cost.replace(
            traffic_scale=0.9 * cost.traffic_scale,
            ops_scale=0.9 * cost.ops_scale,
            attention="fused" if fuses or may_fuse else cost.attention,
        )

    @classmethod
    def choices(cls, profile: ModelProfile, cluster: ClusterSpec) -> Iterable[Self]:
        """All, if something may be replaced: attention that is written out, norms in Python, or a user's pair."""
        is_written_out = profile.attention == "replaceable"
        has_own_norm = any(name.endswith("RMSNorm") and name != "RMSNorm" for name in profile.module_classes)
        if is_written_out or has_own_norm or any(REPLACEMENTS[name].takes_config for name in REPLACEMENTS):
            yield cls()

    def apply(self, ctx: Context) -> Context:
        import torch

        replaced = 0
        for part in ctx.parts:
            param_dtype = next((p.dtype for p in part.parameters() if p.is_floating_point()), torch.float32)
            dtype = compute_dtype(ctx) or param_dtype
            for name in self._chosen():
                report = self._replace(name, part, ctx.device, dtype)
                replaced += len(report.swapped)
                self._log_report(name, report)
        if not replaced:
            logger.warning(
                "module_replace replaced nothing in %s", ", ".join(type(part).__name__ for part in ctx.parts)
            )
        return ctx

    def _chosen(self) -> list[str]:
        if self.pairs is None:
            return [name for name in REPLACEMENTS if REPLACEMENTS[name].by_default]
        return list(self.pairs)

    def _replace(self, name: str, part: torch.nn.Module, device: torch.device, dtype: torch.dtype) -> SwapReport:
        from atorch.model.module_swap import KeptModule, SwapReport

        replacement = REPLACEMENTS[name]
        if dtype not in (replacement.supported_dtypes or all_dtypes()):
            return SwapReport(
                kept=(KeptModule("every module", f"{name} does not support {dtype}, which the model runs in"),)
            )
        return replacement.replace(part, device, (self.pairs or {}).get(name) or {})

    def _log_report(self, name: str, report: SwapReport) -> None:
        if self.verbose:
            for line in (*report.swapped, *report.kept):
                logger.info("module_replace %s: %s", name, line)
        elif report.swapped or report.kept:
            reasons = "; ".join(dict.fromkeys(kept.reason for kept in report.kept))
            because = f", kept {len(report.kept)} ({reasons})" if reasons else ""
            logger.info("module_replace %s: replaced %d%s", name, len(report.swapped), because)


def _installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ImportError:
        return False
