"""tensor_parallel: each process computes a part of every matmul, and the results are summed.

Memory: (parameters + gradients + optimizer states + activations) / tensor, from a column split to the next row split.
Norms and residual streams stay full. Communication per block: two all-reduces of its activations in forward and two in
backward (Shoeybi et al. 2019, arXiv 1909.08053, section 3), so the axis belongs inside a node. The layout of the split
is derived once, from a run of the model on a few samples; a saved strategy keeps it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, TypeAdapter, ValidationError, model_validator
from typing_extensions import Self

from atorch.auto.opt_lib.fsdp import Fsdp
from atorch.auto.opt_lib.parallel_mode import size_of
from atorch.auto.opt_lib.sequence_parallel import SequenceParallel
from atorch.auto.opt_lib.shared.backends import in_pipeline
from atorch.auto.opt_lib.shared.model_requirements import has_compiled_loss, indivisible, on_few_tokens
from atorch.auto.opt_lib.shared.optimizer_compatibility import need_same
from atorch.auto.strategy.method import Method, Phase, method
from atorch.cluster.spec import ClusterSpec
from atorch.cost import Cost, ModelProfile
from atorch.cost.parallelism import split_tensor
from atorch.errors import StrategyError, shown
from atorch.logs import logger

if TYPE_CHECKING:
    import torch
    from torch import nn

    from atorch.auto.context import Context
    from atorch.runtime.tensor_parallel.model_layout import ModelLayout

FEW = 2  # blocks, the fewest that show repetition
LAYOUT_KEY = "tensor_layout"
"""The key of the layout in a strategy's metadata; a saved layout is not derived again."""


@method("tensor_parallel", phase=Phase.TENSOR)
class TensorParallel(Method):
    """Split matmuls over the axis `tensor`."""

    needs_sample: ClassVar[bool] = True

    plan: dict[str, Literal["column", "row"]] | None = None
    """The split of layers, by patterns of their names: {"layers.*.attn.q_proj": "column", …}; None: derived
    from the model."""
    parameter_bytes: Annotated[float, Field(gt=0)] | None = None
    """The most bytes of parameters that a process may hold; the layout within it that sends least is taken. None: the
    fewest bytes possible."""
    loss_parallel: bool = True
    """Keep logits split over the vocabulary for cross entropy, and gather them only for other uses. False: gather
    them in the head."""

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if self.plan is not None and self.parameter_bytes is not None:
            raise ValueError("plan and parameter_bytes are both given; give one of them")
        return self

    @property
    def splits(self) -> tuple[str, ...]:
        return ("tensor",)

    @property
    def shards_parameters(self) -> tuple[str, ...]:
        return self.splits

    def unfit(self, cost: Cost) -> str | None:
        """Require heads, key/value groups and experts that divide evenly."""
        if all(matmul.split == "none" for segment in cost.segments for matmul in segment.matmuls):
            return "no matmul of the model can be split over tensor"
        return indivisible(cost.segments, cost.size("tensor"), "tensor", experts=True)

    @property
    def spans_blocks(self) -> bool:
        return self.parameter_bytes is not None

    def cost(self, cost: Cost) -> Cost:
        """Split the matmuls, from which messages follow. Blocks get full embeddings."""
        split = split_tensor(cost, splits_norms=cost.splits_norms)
        return split.replace(whole_outside=True, gathers_logits=not self.loss_parallel)

    @classmethod
    def choices(cls, profile: ModelProfile, cluster: ClusterSpec) -> Iterable[Self]:
        if cluster.world_size > 1 and any(block.num_heads > 1 for block in profile.blocks):
            yield cls()

    def check_optimizer(self, ctx: Context) -> None:
        if size_of(ctx, "tensor") > 1:
            need_same(ctx, self.name, "rows", "columns")

    def check(self, ctx: Context) -> None:
        if size_of(ctx, "tensor") == 1 or in_pipeline(ctx.strategy):
            return
        for other in ctx.strategy:
            if other.slot == "data_parallel" and other.engine:
                raise StrategyError(
                    f"{other.name} was given backend {other.engine!r} with tensor_parallel, and {other.engine} would "
                    "take each process's part of a parameter for the whole; leave backend out"
                )

    def apply(self, ctx: Context) -> Context:
        """Split the model in place.

        Raises:
            StrategyError: another method excludes it, the axis does not divide the heads, the model contradicts the
                plan, parameter_bytes is too small, or nothing can be split. The model is unchanged.
            ArgumentError: there is no sample batch.
        """
        from atorch.distributed.collectives import from_rank_zero
        from atorch.distributed.rng import share_random_state
        from atorch.runtime.precision.fp8 import log_indivisible_parts, without_fp8
        from atorch.runtime.tensor_parallel import apply_layout

        mesh, strategy = ctx.need_mesh(), ctx.strategy
        if mesh.size("tensor") == 1:
            return ctx
        self.check(ctx)
        (model,) = ctx.parts  # stages are cut later
        tensor, sharding = mesh.device_mesh("tensor"), strategy.get(Fsdp)  # finds zero2 too, a subclass
        spreads = sharding is not None and not sharding.engine
        splits = self.loss_parallel and not has_compiled_loss(ctx)
        layout = self._saved_layout(model, from_rank_zero(strategy.metadata.get(LAYOUT_KEY)), mesh.size("tensor"))
        how: Any = {"as_dtensors": spreads, "loss_parallel": splits}
        with without_fp8(model):
            if layout is not None:
                apply_layout(model, layout, tensor, **how)
            else:
                layout = self._split(ctx, model, **how)
            for other in strategy:
                if isinstance(other, SequenceParallel):
                    other.complete(ctx, layout)
        log_indivisible_parts(model)
        share_random_state(mesh.group("tensor"), ctx.device)
        return replace(ctx, layout=layout, metadata={**ctx.metadata, LAYOUT_KEY: written(layout, self._plan_knobs)})

    def _split(self, ctx: Context, model: nn.Module, **how: Any) -> ModelLayout:
        """Derive a layout, and split the model by it."""
        from atorch.model.meta_device import has_meta
        from atorch.runtime.tensor_parallel import apply_layout, tensor_parallel

        run, tensor = on_few_tokens(ctx, self.name), ctx.need_mesh().device_mesh("tensor")
        watched = self._few_blocks_of(model, ctx.device) if has_meta([model]) else model
        layout = tensor_parallel(watched, run, tensor, **self._plan_knobs, **how, is_agreed=True)
        if watched is not model:
            layout = self._of_all_blocks(layout, watched, model)
            apply_layout(model, layout, tensor, **how)
        _log_kept(model, layout)
        return layout

    def _few_blocks_of(self, model: nn.Module, device: torch.device) -> nn.Module:
        """A copy of the first blocks of a meta model, with values that are the same on all processes.

        It has all blocks if they are of several kinds, or if `parameter_bytes` is set, which concerns all of them.
        """
        import torch

        from atorch.distributed.rng import preserved_rng
        from atorch.model.copy import copy_structure, lazy_copy
        from atorch.model.structure import num_repeats, shorten

        copied = copy_structure(model, lambda tensor: tensor)
        if self.parameter_bytes is None and (num_repeats(copied) or 0) > FEW:
            shorten(copied, FEW)
        with preserved_rng():
            torch.manual_seed(0)
            return lazy_copy(copied, device)

    def _of_all_blocks(self, layout: ModelLayout, few: nn.Module, model: nn.Module) -> ModelLayout:
        from atorch.model.structure import extended_to_all, repeated_blocks

        of_few = written(layout, self._plan_knobs)
        kept = extended_to_all(of_few, list(repeated_blocks(few)), list(repeated_blocks(model)))
        full = read_layout(kept, model, layout.degree, self._plan_knobs)
        if isinstance(full, str):
            raise StrategyError(f"tensor_parallel cannot tell all blocks of {type(model).__name__} from two: {full}")
        return full

    @property
    def _plan_knobs(self) -> dict[str, Any]:
        return {"plan": self.plan, "parameter_bytes": self.parameter_bytes}

    def _saved_layout(self, model: nn.Module, kept: Any, degree: int) -> ModelLayout | None:
        """The layout of a saved strategy, if it fits the model, the knobs and the number of processes; else None."""
        if kept is None:
            return None
        layout = read_layout(kept, model, degree, self._plan_knobs)
        if isinstance(layout, str):
            logger.warning("the layout that the strategy keeps is not used, and another derived: %s", layout)
            return None
        return layout

    def trace_metadata(self, ctx: Context, axes: Mapping[str, int]) -> Mapping[str, Any]:
        from atorch.runtime.precision.fp8 import without_fp8
        from atorch.runtime.tensor_parallel import derive_layout

        degree = axes.get("tensor", 1)
        if degree == 1:
            return {}
        (model,) = ctx.parts
        with without_fp8(model):
            layout = derive_layout(model, on_few_tokens(ctx, self.name), degree, **self._plan_knobs)
        return {LAYOUT_KEY: written(layout, self._plan_knobs)}


def _log_kept(model: nn.Module, layout: ModelLayout) -> None:
    """Log what stays full, by reason; raise if nothing is split."""
    reasons: dict[str, list[str]] = {}
    for kept in layout.kept:
        reasons.setdefault(kept.reason, []).append(kept.name)
    if not layout.rows:
        examples = "; ".join(f"{', '.join(names[:3])}: {reason}" for reason, names in list(reasons.items())[:3])
        raise StrategyError(
            f"nothing of {type(model).__name__} can be split over tensor ({examples or 'it has no products'}); leave "
            "tensor_parallel out"
        )
    for reason, names in reasons.items():
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        logger.info("tensor_parallel leaves %s%s whole: %s", ", ".join(names[:3]), more, reason)


def written(layout: ModelLayout, asked: Mapping[str, Any]) -> dict[str, Any]:
    """The layout, and the knobs that it was derived for, as JSON data."""
    return {**asked, **_adapter().dump_python(layout, mode="json")}


def read_layout(kept: Any, model: nn.Module, degree: int, asked: Mapping[str, Any]) -> ModelLayout | str:
    """The layout in `kept`, or the reason why it does not fit the model, the knobs or the number of processes."""
    from atorch.runtime.tensor_parallel.model_layout import why_not_of

    if not isinstance(kept, Mapping) or any(kept.get(name) != value for name, value in asked.items()):
        return f"it was derived by another {' or '.join(asked)}"
    try:
        layout = _adapter().validate_python({name: value for name, value in kept.items() if name not in asked})
    except ValidationError as error:
        fault = error.errors()[0]
        return f"{'.'.join(map(str, fault['loc']))} is {shown(fault['input'])}: {fault['msg']}"
    return why_not_of(layout, model, degree) or layout


def _adapter() -> TypeAdapter[ModelLayout]:
    from atorch.runtime.tensor_parallel.model_layout import ModelLayout

    return TypeAdapter(ModelLayout)
