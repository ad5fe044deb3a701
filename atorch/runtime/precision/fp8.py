"""Linear layers that multiply in 8-bit floats and keep their parameters as they are.

Hardware of compute capability 8.9 computes twice as many fp8 as bf16 products a second. A tensor needs a scale to fit
the range. e4m3 has 3 bits of mantissa and reaches 448, e5m2 has 2 and reaches 57344 (Micikevicius et al. 2022, arXiv
2209.05433). Inputs and weights are e4m3; gradients are e5m2 under "HYBRID" and e4m3 under "E4M3".

There are two backends. transformer-engine ("te") takes the scale from the largest values of past steps (delayed
scaling). So each layer has a state, and the model's forward runs inside its autocast. torchao takes the scale from the
current tensor, or from each of its rows, by one more pass over it. It needs no state and no context around forward. It
supports torch.compile and recomputation. It can also emulate fp8 on devices without an fp8 matmul (CPUs): quantize, and
multiply in the old dtype.

Only `nn.Linear` modules whose weight is a multiple of 16 in both dimensions are converted. The gradient of the weight
also needs a multiple of 16 tokens per batch. Leave out the output layer of a language model: exclude=("lm_head",).

A rank that has a part of a weight, or of the tokens, scales its part by its own values. The largest value of a part is
at most that of the whole, so that its values are rounded no more. Results are summed in the wider dtype.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from atorch.errors import CapabilityError, StrategyError, near_miss
from atorch.logs import logger
from atorch.model.module_swap import KeptModule, SwapReport, swap_candidates
from atorch.model.pytree import local_part
from atorch.model.wrapper import override, override_forward
from atorch.runtime.precision.fp8_recipe import INSTALL, Backend, Fp8Recipe, choose_backend

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

MULTIPLE = 16


@dataclass(frozen=True, slots=True)
class Fp8Report:
    """The converted layers and their backend, and the Linear layers that were kept, with reasons."""

    backend: Literal["te", "torchao"]
    emulated: bool
    layers: SwapReport

    @property
    def converted(self) -> tuple[str, ...]:
        """The first name of each converted layer."""
        return tuple(swap.names[0] for swap in self.layers.swapped)

    @property
    def left(self) -> tuple[KeptModule, ...]:
        """The Linear layers that were kept, with the reason."""
        return self.layers.kept


def convert_linears(
    model: nn.Module,
    *,
    include: Collection[str] | None = None,
    exclude: Collection[str] | None = None,
    backend: Backend = "auto",
    recipe: Fp8Recipe | None = None,
    emulate: bool | None = None,
    device: torch.device | None = None,
    group: ProcessGroup | None = None,
    fsdp_float8_all_gather: bool = False,
) -> Fp8Report:
    """Let the model's Linear layers multiply in fp8, in place; parameters stay the same objects.

    Args:
        include: substrings, one of which a layer's dotted name must have; None for all layers.
        exclude: substrings, none of which it may have.
        backend: "auto" is te if it is installed and the model runs on CUDA, else torchao.
        recipe: the choice of scales.
        emulate: torchao only: quantize, but multiply in the old dtype. None: only if the device is not CUDA.
        device: the device on which the model will run; by default that of its parameters.
        group: te only: the ranks with the same layers, which share their largest values; all by default.
        fsdp_float8_all_gather: torchao, scaling by tensors only: let `runtime.fsdp.shard` gather weights in 8 bits.

    Raises:
        CapabilityError: the backend's package is not installed.
        StrategyError: the arguments contradict each other, or a substring is in no Linear layer's name.
    """
    recipe = recipe or Fp8Recipe()
    device = device or next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    chosen = choose_backend(backend, recipe, emulate, device.type)
    _check_names(model, include, "include")
    _check_names(model, exclude, "exclude")
    emulated = chosen == "torchao" and (device.type != "cuda" if emulate is None else emulate)
    make = _te_linear() if chosen == "te" else _torchao_linear(recipe, emulated, fsdp_float8_all_gather)
    places = Counter(child for module in model.modules() for child in module._modules.values() if child is not None)
    shared = {child for child, count in places.items() if count > 1 and chosen == "te" and recipe.reduce_amax}
    adapters = _inside_adapters(model)

    def build(name: str, module: Any) -> nn.Module | str:
        return (
            _why_not(name, module, include, exclude)
            or ("it is inside a peft adapter, with which fp8 is not supported" if name in adapters else None)
            or ("it stands in several places, for which te shares no scales" if module in shared else None)
            or make(module)
        )

    layers = swap_candidates(model, lambda module: type(module) is nn.Linear, build)
    if chosen == "te" and layers.swapped:
        # One region around the model, not one per layer: te updates all scales when the outermost region ends.
        override_forward(model, _inside, _te_region(recipe, group))
    return Fp8Report(chosen, emulated, layers)


def _check_names(model: nn.Module, parts: Collection[str] | None, knob: str) -> None:
    """Raise for substrings that are in no name, as a mistyped exclude would convert a layer by mistake.

    If another include matches a layer, this only logs a warning.
    """
    if isinstance(parts, str):
        raise StrategyError(f"fp8 {knob} was given the string {parts!r}; give a list of them: [{parts!r}]")
    names = [name for name, module in model.named_modules() if type(module) is nn.Linear]
    any_match = any(part in name for part in parts or () for name in names)
    for part in parts or ():
        if not any(part in name for name in names):
            if any_match and knob == "include":  # other substrings still select layers
                logger.warning("fp8 include has %r, but no nn.Linear of %s is called so", part, type(model).__name__)
                continue
            near = near_miss(part, {step for name in names for step in name.split(".") if not step.isdigit()})
            raise StrategyError(
                f"fp8 {knob} has {part!r}, but no nn.Linear of {type(model).__name__} is called so; {near}"
            )


def _why_not(
    name: str, module: nn.Linear, include: Collection[str] | None, exclude: Collection[str] | None
) -> str | None:
    if include is not None and not any(part in name for part in include):
        return "include does not name it"
    excluding = next((part for part in exclude or () if part in name), None)
    if excluding is not None:
        return f"exclude names it ({excluding!r})"
    rows, columns = module.weight.shape
    if _is_indivisible(module.weight.shape):
        return f"its weight is {rows} × {columns}; both must be multiples of {MULTIPLE}"
    return None


def _inside_adapters(model: nn.Module) -> frozenset[str]:
    """Names of modules inside peft layers, which, unlike peft's model classes, have a `base_layer`."""
    prefixes = tuple(
        f"{name}."
        for name, module in model.named_modules()
        if type(module).__module__.partition(".")[0] == "peft" and "base_layer" in module._modules
    )
    return frozenset(name for name, _ in model.named_modules() if prefixes and name.startswith(prefixes))


def _torchao_linear(recipe: Fp8Recipe, emulate: bool, gathers: bool) -> Callable[[nn.Linear], nn.Module]:
    from torchao.float8 import CastConfig, Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(recipe.scaling.replace("_gw", "_with_gw"))
    knobs: dict[str, Any] = {"emulate": emulate}
    if recipe.scaling == "tensorwise" and recipe.fp8_format == "E4M3":
        gradient = CastConfig(target_dtype=config.cast_config_input.target_dtype)
        knobs |= {"cast_config_grad_output": gradient, "cast_config_grad_output_for_grad_weight": gradient}
    config = dataclasses.replace(config, **knobs)

    def make(module: nn.Linear) -> nn.Module:
        converted: nn.Module = convert_to_float8_training(module, config=config)
        converted.multiplies_in_fp8, converted.gathers_in_fp8 = True, gathers  # type: ignore[assignment]  # plain
        override(converted, "forward", _in_fp8_or_not)
        return converted

    return make


def _in_fp8_or_not(in_fp8: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: Any, input: Tensor) -> Tensor:
        weight = self.weight  # under tensor_parallel this rank's part
        if self.multiplies_in_fp8 and not _is_indivisible(weight.shape):
            product: Tensor = in_fp8(self, input)
            return product
        if hasattr(weight, "to_original_precision"):  # gathered in 8 bits
            weight = weight.to_original_precision()
        return F.linear(input, weight, self.bias)

    return forward


def can_gather_in_fp8(module: nn.Module, shape: Sequence[int]) -> bool:
    """True if `module` multiplies weights of this shape in fp8, and lets fsdp gather them so."""
    return bool(vars(module).get("gathers_in_fp8")) and not _is_indivisible(shape)


def _is_indivisible(shape: Sequence[int]) -> bool:
    return any(size % MULTIPLE for size in shape)


@contextmanager
def without_fp8(model: nn.Module) -> Iterator[None]:
    """A context in which torchao's layers of `model` multiply in the old dtype: for comparisons of exact results."""
    layers = _layers(model)
    for layer in layers.values():
        layer.multiplies_in_fp8 = False
    try:
        yield
    finally:
        for layer in layers.values():
            layer.multiplies_in_fp8 = True


def log_indivisible_parts(model: nn.Module) -> None:
    """Log the layers that keep the old dtype, as this rank's part of their weight is not a multiple of 16."""
    parts = {name: local_part(layer._parameters["weight"]) for name, layer in _layers(model).items()}
    if left := [name for name, part in parts.items() if _is_indivisible(part.shape)]:
        logger.info("fp8 leaves %s, whose parts are not multiples of %d", ", ".join(left), MULTIPLE)


def _layers(model: nn.Module) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if "multiplies_in_fp8" in vars(module)}


def _te_linear() -> Callable[[nn.Linear], nn.Module]:
    try:
        import transformer_engine.pytorch as te
    except ImportError as error:
        raise CapabilityError(
            f"fp8 by te needs transformer-engine built for torch, and importing it failed ({error}): "
            f'{INSTALL["transformer_engine"]}, or use backend="torchao"'
        ) from error

    def make(module: nn.Linear) -> nn.Module:
        # The meta device avoids allocation and random draws, since its own parameters are replaced.
        linear: nn.Module = te.Linear(
            module.in_features,
            module.out_features,
            bias=module.bias is not None,
            params_dtype=module.weight.dtype,
            device="meta",
        )
        linear.weight = module.weight
        if module.bias is not None:
            linear.bias = module.bias
        return linear

    return make


def _te_region(recipe: Fp8Recipe, group: ProcessGroup | None) -> Callable[[], AbstractContextManager[Any]]:
    import inspect

    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import DelayedScaling, Format

    knobs = dataclasses.asdict(recipe) | {"fp8_format": Format[recipe.fp8_format]}
    del knobs["scaling"]
    if "interval" not in inspect.signature(DelayedScaling).parameters:
        if recipe.interval != 1:
            raise CapabilityError(
                f"fp8 was given interval={recipe.interval}, which the installed transformer-engine no longer has (its "
                "scales are new in every step); leave interval out"
            )
        del knobs["interval"]
    scaling = DelayedScaling(**knobs)
    if hasattr(te, "autocast"):
        return lambda: te.autocast(enabled=True, recipe=scaling, amax_reduction_group=group)
    return lambda: te.fp8_autocast(enabled=True, fp8_recipe=scaling, fp8_group=group)


def _inside(forward: Callable[..., Any], make_region: Callable[[], AbstractContextManager[Any]]) -> Callable[..., Any]:
    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with make_region():
            return forward(self, *args, **kwargs)

    return run
