"""The scales of fp8 matmuls and the package that computes them, chosen without torch, as a plan does."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

from atorch.errors import CapabilityError, StrategyError

Backend = Literal["auto", "te", "torchao"]
Scaling = Literal["tensorwise", "rowwise", "rowwise_gw_hp"]
MIN_CAPABILITY = (8, 9)  # Ada; Hopper is 9.0


@dataclass(frozen=True, slots=True)
class Fp8Recipe:
    """The choice of scales: the fields of transformer-engine's `DelayedScaling`, with its defaults, and torchao's.

    torchao scales by the current tensor, and uses only `scaling` and `fp8_format`.
    """

    margin: int = 0  # scales are divided by 2**margin
    interval: int = 1  # steps between new scales
    fp8_format: Literal["HYBRID", "E4M3"] = "HYBRID"
    amax_history_len: int = 1024  # steps
    amax_compute_algo: Literal["max", "most_recent"] = "max"
    reduce_amax: bool = True  # over the ranks that hold the same layers
    scaling: Scaling = "tensorwise"  # torchao: one scale a tensor or a row; gw_hp: weight gradients in the old dtype

    def delayed(self) -> tuple[str, ...]:
        """The names of fields that differ from their defaults and need delayed scaling."""
        default = Fp8Recipe()
        names = (field.name for field in dataclasses.fields(self) if field.name not in ("fp8_format", "scaling"))
        return tuple(name for name in names if getattr(self, name) != getattr(default, name))


def choose_backend(
    backend: Backend, recipe: Fp8Recipe, emulate: bool | None, device_type: str
) -> Literal["te", "torchao"]:
    """The package that a conversion will use.

    Raises:
        CapabilityError: it is not installed.
        StrategyError: the backend or device does not support the recipe or emulation.
    """
    delayed = recipe.delayed()
    if backend == "auto":
        wants_te = device_type == "cuda" and not emulate and (bool(delayed) or _installed("transformer_engine"))
        backend = "te" if wants_te and recipe.scaling == "tensorwise" else "torchao"
    if backend == "te":
        if recipe.scaling != "tensorwise":
            raise StrategyError(
                f'fp8 was given scaling {recipe.scaling!r} with backend "te", which scales by past steps; '
                'use backend="torchao"'
            )
        if emulate:
            raise StrategyError(
                'fp8 was given emulate=True with backend "te"; only torchao emulates: backend="torchao"'
            )
        if device_type != "cuda":
            raise StrategyError(
                f'fp8 was given backend "te", which runs on CUDA; this is {device_type}. '
                'Use backend="torchao", emulate=True'
            )
        _need("transformer_engine", "te")
        return "te"
    if delayed:
        raise StrategyError(
            f"fp8 was given {', '.join(delayed)}, but torchao scales by the tensor at hand and has no such knob; "
            'leave them out, or use backend="te" (on CUDA)'
        )
    _need("torchao", "torchao")
    return "torchao"


INSTALL: Mapping[str, str] = {
    "transformer_engine": "pip install transformer-engine[pytorch]",
    "torchao": "pip install torchao",
}


def _need(package: str, backend: str) -> None:
    if not _installed(package):
        raise CapabilityError(f"fp8 by {backend} needs {package}, which is not installed: {INSTALL[package]}")


def _installed(package: str) -> bool:
    return find_spec(package) is not None
