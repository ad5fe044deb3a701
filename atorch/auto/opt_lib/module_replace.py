"""module_replace: modules of the model replaced by faster ones that compute the same.

Attention written out step by step becomes `scaled_dot_product_attention`, which saves no (queries × keys) weights for
backward. RMSNorm becomes one operation that saves only its input. `register_replace_pair` adds users' replacements.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from typing import Any

import torch
from pydantic import field_validator
from typing_extensions import Self

from atorch.auto.context import Context
from atorch.auto.opt_lib.module_replace_optimization import REPLACEMENTS
from atorch.auto.opt_lib.shared.precision import compute_dtype
from atorch.auto.strategy.method import Method, Phase, method
from atorch.cluster.spec import ClusterSpec
from atorch.cost import Cost, ModelProfile
from atorch.errors import CapabilityError
from atorch.logs import logger
from atorch.model.module_swap import KeptModule, SwapReport


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
        return cost.but(
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
        replaced = 0
        for part in ctx.parts:
            own = next((p.dtype for p in part.parameters() if p.is_floating_point()), torch.float32)
            dtype = compute_dtype(ctx) or own
            for name in self._chosen():
                report = self._replace(name, part, ctx.device, dtype)
                replaced += len(report.swapped)
                self._tell(name, report)
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
        replacement = REPLACEMENTS[name]
        if dtype not in replacement.supported_dtypes:
            return SwapReport(
                kept=(KeptModule("every module", f"{name} does not support {dtype}, which the model runs in"),)
            )
        return replacement.replace(part, device, (self.pairs or {}).get(name) or {})

    def _tell(self, name: str, report: SwapReport) -> None:
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
