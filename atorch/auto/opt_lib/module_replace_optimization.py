"""The table of replacements, and the function by which users add theirs.

register_replace_pair("my_norm", supported_dtypes={torch.float32}, pair_cls=(SlowNorm, FastNorm))

@register_replace_pair("my_norm")
class FastNorm(SlowNorm):
    def __init__(self, src_module): ...
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, overload

import torch
from torch import nn

from atorch.errors import StrategyError
from atorch.model.module_swap import SwapReport, adopt_state, swap_candidates
from atorch.registry import Registry
from atorch.runtime.fused import fuse_cross_entropy, fuse_layer_norms, fuse_rms_norms
from atorch.runtime.fused.attention import fuse_multihead_attention, use_sdpa

ALL_DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})

C = TypeVar("C", bound=type[nn.Module])


class Replace(Protocol):
    """Replaces modules of a model that will run on `device`; `config` comes from the strategy."""

    def __call__(self, model: nn.Module, device: torch.device, config: Mapping[str, Any]) -> SwapReport: ...


@dataclass(frozen=True, slots=True)
class Replacement:
    """One entry: the function, its compute dtypes, and `by_default` if it runs without being named."""

    replace: Replace
    supported_dtypes: frozenset[torch.dtype] = ALL_DTYPES
    by_default: bool = True
    takes_config: bool = False
    fuses_attention: bool = False
    package: str | None = None  # that it needs; without it nothing is replaced


REPLACEMENTS: Registry[Replacement] = Registry("replacement")


@overload
def register_replace_pair(
    pair_name: str,
    supported_dtypes: Collection[torch.dtype] = ...,
    pair_cls: None = ...,
    *,
    match_subclasses: bool = ...,
    **kwargs: Any,
) -> Callable[[C], C]: ...
@overload
def register_replace_pair(
    pair_name: str,
    supported_dtypes: Collection[torch.dtype] = ...,
    *,
    pair_cls: tuple[type[nn.Module], type[nn.Module]],
    match_subclasses: bool = ...,
    **kwargs: Any,
) -> None: ...
def register_replace_pair(
    pair_name: str,
    supported_dtypes: Collection[torch.dtype] = ALL_DTYPES,
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
    model must compute in one of `supported_dtypes`.

    Raises:
        StrategyError: the pair is invalid, or the replacement's constructor takes no `src_module`.
        ValueError: the name is taken.
    """
    if pair_name in ("pairs", "verbose"):
        raise StrategyError(f"module_replace uses {pair_name!r} itself; give the pair another name")
    dtypes = frozenset(supported_dtypes)
    if not dtypes or not dtypes <= ALL_DTYPES:
        allowed, requested = (", ".join(sorted(map(str, group))) for group in (ALL_DTYPES, dtypes))
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
    for cls in (source, target):
        if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
            raise StrategyError(f"replacement {name!r} has {cls!r}, which is no module class")
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


def _whole_model(function: Callable[[nn.Module], SwapReport]) -> Replace:
    return lambda model, device, config: function(model)


def _on_device(function: Callable[[nn.Module, torch.device], SwapReport]) -> Replace:
    return lambda model, device, config: function(model, device)


REPLACEMENTS.add("attention_sdpa", Replacement(_whole_model(use_sdpa), fuses_attention=True))
REPLACEMENTS.add("multihead_attention_sdpa", Replacement(_whole_model(fuse_multihead_attention), fuses_attention=True))
REPLACEMENTS.add("rms_norm_fused", Replacement(_whole_model(fuse_rms_norms)))
REPLACEMENTS.add("layer_norm_apex", Replacement(_on_device(fuse_layer_norms), package="apex.normalization"))
REPLACEMENTS.add(
    "cross_entropy_liger",
    Replacement(_on_device(fuse_cross_entropy), by_default=False, package="liger_kernel.transformers.cross_entropy"),
)
