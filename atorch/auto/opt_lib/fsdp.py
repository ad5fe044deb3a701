"""fsdp: parameters, gradients and optimizer states sharded over the processes, and gathered block by block for use.

Memory: (parameters + gradients + optimizer states) / shards, plus about two gathered blocks, embeddings and head.
Communication per step: parameters are all-gathered in forward and again in backward, gradients reduce-scattered. If
`parallel_mode` has both zero and data, shards are over zero, and gradient shards are all-reduced over data.
It uses `fully_shard` (FSDP2); `compat/fsdp1_arguments.py` translates FSDP1's constructor arguments.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic.json_schema import SkipJsonSchema
from typing_extensions import Self

from atorch.auto.opt_lib.offload import Offload
from atorch.auto.opt_lib.parallel_mode import size_of
from atorch.auto.opt_lib.shared.model_requirements import (
    changes_modules,
    need_dense_gradients,
    need_own_code,
    need_own_storage,
    need_real_parameters,
)
from atorch.auto.opt_lib.shared.optimizer_compatibility import need_same, state_bytes
from atorch.auto.opt_lib.shared.precision import short_name, torch_dtype
from atorch.auto.strategy.method import Method, Phase, method
from atorch.cluster.spec import ClusterSpec
from atorch.cost import Cost, ModelProfile
from atorch.cost.parallelism import REPLICA_AXES
from atorch.cost.parallelism import shard as shard_cost
from atorch.cost.state import reduce_once
from atorch.errors import StrategyError

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from atorch.auto.context import Context
    from atorch.runtime.fsdp.groups import FsdpUnit

SETTLED = ("auto_wrap_policy", "ignored_modules")
KEEPING = ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2")
Dtype = Annotated[Literal["fp32", "fp16", "bf16"], BeforeValidator(short_name)]


class MixedPrecision(BaseModel):
    """Types by purpose; None keeps the parameters' own."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    param_dtype: Dtype | None = None
    """The type of gathered parameters, and so of forward and backward."""
    reduce_dtype: Dtype | None = None
    """The type of the gradients' reduction; None: param_dtype."""
    output_dtype: Dtype | None = None
    """The type of the outputs of gathered modules."""
    buffer_dtype: Dtype | None = None
    """The type that floating-point buffers are cast to, once."""
    cast_forward_inputs: bool = True
    """Cast the inputs of every gathered module to param_dtype."""
    cast_root_forward_inputs: bool = True
    """Cast the inputs of the model."""

    @staticmethod
    def from_torch(value: Any) -> Any:
        """torch's MixedPrecision and MixedPrecisionPolicy as dicts of their settings; any other value unchanged.

        Raises:
            ValueError: a setting of FSDP1's that FSDP2 cannot follow.
        """
        if not is_dataclass(value) or isinstance(value, type):
            return value
        from torch import nn

        settings = {field.name: getattr(value, field.name) for field in fields(value)}
        if settings.pop("keep_low_precision_grads", False):
            raise ValueError("keep_low_precision_grads: FSDP2 keeps gradients in the parameters' type; leave it out")
        classes = settings.pop("_module_classes_to_ignore", ())
        if any(cls is not nn.modules.batchnorm._BatchNorm for cls in classes):
            raise ValueError("_module_classes_to_ignore: FSDP2 has one precision for all; use atorch_ignored_cls")
        # Settings of newer torch versions are unknown here, and ignored as long as they have their defaults.
        unset = {field.name for field in fields(value) if settings.get(field.name) == field.default}
        return {k: v for k, v in settings.items() if k in MixedPrecision.model_fields or k not in unset}

    def policy(self, *, root: bool = False) -> MixedPrecisionPolicy:
        """torch's policy for the root, or for all other modules."""
        from torch.distributed.fsdp import MixedPrecisionPolicy

        return MixedPrecisionPolicy(
            param_dtype=self.param_dtype and torch_dtype(self.param_dtype),
            reduce_dtype=self.reduce_dtype and torch_dtype(self.reduce_dtype),
            output_dtype=self.output_dtype and torch_dtype(self.output_dtype),
            cast_forward_inputs=self.cast_root_forward_inputs if root else self.cast_forward_inputs,
        )

    def cast_buffers(self, model: nn.Module) -> None:
        """Cast the floating-point buffers to buffer_dtype, if that is given."""
        if self.buffer_dtype is None:
            return
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.is_floating_point():
                    module._buffers[name] = buffer.to(torch_dtype(self.buffer_dtype))


@method("fsdp", phase=Phase.SHARD, slot="data_parallel")
class Fsdp(Method):
    """Shard parameters, gradients and optimizer states."""

    acts_in_calls: ClassVar[bool] = True
    needs_replicas: ClassVar[bool] = True

    atorch_wrap_cls: tuple[str, ...] = ()
    """Classes or names of the modules to gather as one, exactly these. Empty: the repeated blocks, the embeddings and
    the head."""
    atorch_size_based_min_num_params: int | None = Field(default=None, ge=1)
    """Instead, gather as one the smallest modules with at least this many parameters."""
    atorch_ignored_cls: tuple[str, ...] = ()
    """Classes or names of modules, or names of parameters, that stay full on every process."""
    wrap_trainable_outmost: bool = False
    """Gather all trainable parameters as one group, once a step, and frozen ones block by block: for LoRA."""
    sharding_strategy: (
        Literal["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2", "NO_SHARD"] | None
    ) = None
    """FSDP1's name for what is freed after forward. The HYBRID ones require the axes zero and data; NO_SHARD shards
    nothing."""
    reshard_after_forward: bool | int | None = None
    """True: free gathered parameters after forward. False: keep them for backward. A number: keep them over so many
    processes. None: free blocks; keep embeddings, head and root."""
    mixed_precision: Annotated[MixedPrecision | None, BeforeValidator(MixedPrecision.from_torch)] = None
    """Types of gathered parameters and of the reduction; None: the precision method's, reducing in fp32."""
    cpu_offload: bool = False
    """Keep shards, gradients and optimizer states in host memory."""
    forward_prefetch: bool = False
    """Issue each group's all-gather before the forward pass of the group before it."""
    sync_module_states: bool = False
    """Broadcast rank 0's parameters and buffers group by group; auto_accelerate compares them all beforehand."""
    auto_wrap_policy: SkipJsonSchema[Any] = Field(default=None, exclude=True, repr=False)
    """A policy or function of FSDP1, evaluated on the model: names of the modules it wraps become atorch_wrap_cls."""
    ignored_modules: SkipJsonSchema[tuple[Any, ...]] = Field(default=(), exclude=True, repr=False)
    """Modules and parameters of the model; their names are added to atorch_ignored_cls."""
    param_init_fn: SkipJsonSchema[Any] = Field(default=None, exclude=True, repr=False)
    """Fills modules on the meta device, like `auto_accelerate`'s argument of this name; not saved in strategy files."""

    @classmethod
    def of(cls, config: Any = None) -> Self:
        """Accept FSDP1's constructor arguments, too, and `fsdp_wrap_params_outmost` for `wrap_trainable_outmost`."""
        from atorch.compat.fsdp1_arguments import knobs_of
        from atorch.model.structure import module_names

        if isinstance(config, Mapping):
            config = knobs_of(config, cls.name)
            if "fsdp_wrap_params_outmost" in config:
                outmost = config.pop("fsdp_wrap_params_outmost")
                if config.setdefault("wrap_trainable_outmost", outmost) != outmost:
                    raise StrategyError(f"{cls.name} has fsdp_wrap_params_outmost and wrap_trainable_outmost differ")
            for knob in ("atorch_wrap_cls", "atorch_ignored_cls"):
                if config.get(knob) is not None:
                    config[knob] = module_names(config[knob], f"{cls.name} {knob}")
                elif knob in config:
                    del config[knob]
        return super().of(config)

    @model_validator(mode="after")
    def _hold(self) -> Self:
        if self.atorch_wrap_cls and self.atorch_size_based_min_num_params is not None:
            raise ValueError("give atorch_wrap_cls or atorch_size_based_min_num_params, not both")
        if self.auto_wrap_policy is not None and (self.atorch_wrap_cls or self.atorch_size_based_min_num_params):
            raise ValueError("give auto_wrap_policy, or atorch_wrap_cls or atorch_size_based_min_num_params, not both")
        if self.sharding_strategy in KEEPING and self.reshard_after_forward not in (None, False):
            raise ValueError(f"{self.sharding_strategy} keeps parameters for backward; leave reshard_after_forward out")
        return self

    def settled(self, model: nn.Module) -> Self:
        """The method with names of the model's modules in place of a policy, modules and parameters."""
        from atorch.compat.fsdp1_arguments import names_within, wrapped_names

        if self.auto_wrap_policy is None and not self.ignored_modules:
            return self
        ignored = (*self.atorch_ignored_cls, *names_within(model, self.ignored_modules))
        changed: dict[str, Any] = {"atorch_ignored_cls": ignored} if ignored else {}
        if self.auto_wrap_policy is not None:
            left_out = [*self.ignored_modules, *self._named_as_ignored(model)]
            wrapped = wrapped_names(self.auto_wrap_policy, model, left_out)
            if not wrapped:
                raise StrategyError(
                    f"{self.name}.auto_wrap_policy wraps no module of {type(model).__name__}; give another, or leave "
                    "it out to gather the model block by block"
                )
            changed["atorch_wrap_cls"] = wrapped
        kept = {name: getattr(self, name) for name in self.model_fields_set if name not in SETTLED}
        return type(self)(**{**kept, **changed})

    def _named_as_ignored(self, model: nn.Module) -> list[nn.Module]:
        from atorch.model.structure import find_modules

        parameters = dict(model.named_parameters(remove_duplicate=False))
        names = [name for name in self.atorch_ignored_cls if name not in parameters]
        return list(find_modules(model, names, f"{self.name} atorch_ignored_cls").values())

    @property
    def splits(self) -> tuple[str, ...]:
        """The axis zero; shards stay within it if the mesh has data, too."""
        return ("zero",)

    @property
    def shards_parameters(self) -> tuple[str, ...]:
        return () if self.engine else REPLICA_AXES

    @property
    def joins_backward(self) -> str:
        return "does not keep weights gathered until then: use ddp or zero1 instead"

    def cost(self, cost: Cost) -> Cost:
        """Shards of everything, and the parameters that are gathered at one moment.

        These are all parameters if they are kept for backward, else two blocks (one is prefetched) and those outside
        of blocks. Gradients of a block are full, in fp32, until they are reduced.
        """
        is_hybrid = cost.size("data") > 1 and cost.size("zero") > 1
        replicas: tuple[str, ...] = ("data",) if is_hybrid else ()
        if self.sharding_strategy == "NO_SHARD":
            replicas = REPLICA_AXES
        gathered, reduced = self._itemsizes(cost)
        if self.cpu_offload or not isinstance(self.reshard_after_forward, bool | None):
            cost = cost.replace(fp8_sent="none")
        cost = shard_cost(
            cost,
            axes=tuple(axis for axis in REPLICA_AXES if axis not in replicas),
            replicas=replicas,
            itemsize=gathered,
            reduced_itemsize=reduced,
            keeps_gathered=self.reshard_after_forward is False or self.sharding_strategy in KEEPING,
        )
        if self.cpu_offload:
            cost = cost.replace(param_offload=1.0, optim_offload=1.0)
        return reduce_once(cost.replace(reduced_itemsize=reduced, grads_persist=False))

    def _itemsizes(self, cost: Cost) -> tuple[float, float]:
        """Bytes of a gathered and of a reduced element; by default, those of the precision method and of the cost."""
        precision = self.mixed_precision or MixedPrecision()
        gathered = cost.param_itemsize if cost.dtype == "float32" else 2.0
        if precision.param_dtype is not None:
            gathered = _itemsize(precision.param_dtype)
        reduced = precision.reduce_dtype or precision.param_dtype
        return gathered, (cost.reduced_itemsize or gathered) if reduced is None else _itemsize(reduced)

    @classmethod
    def choices(cls, profile: ModelProfile, cluster: ClusterSpec) -> Iterable[Self]:
        if cluster.world_size > 1:
            yield cls()

    def check_optimizer(self, ctx: Context) -> None:
        need_same(ctx, self.name, "sharded")

    def check(self, ctx: Context) -> None:
        import torch

        settled = self.settled(ctx.root)
        if settled is not self:
            settled.check(ctx)
            return
        is_hybrid = size_of(ctx, "data") > 1 and size_of(ctx, "zero") > 1
        if "HYBRID" in (self.sharding_strategy or "") and not is_hybrid:
            raise StrategyError(
                f"{self.name} was given {self.sharding_strategy}, but parallel_mode has no two axes to share out; "
                'name both: ("parallel_mode", ([("zero", shards), ("data", replicas)], None))'
            )
        group = self.reshard_after_forward
        shards = size_of(ctx, *(axis for axis in REPLICA_AXES if axis != "data" or not is_hybrid))
        shards = 1 if self.sharding_strategy == "NO_SHARD" else shards
        if not isinstance(group, bool) and group is not None and (not 1 < group < shards or shards % group):
            raise StrategyError(
                f"{self.name}.reshard_after_forward was given {group}; parameters are spread over {shards} processes, "
                "and it must be a divisor of that other than 1 and itself, or True or False"
            )
        may_change = changes_modules(ctx) or ctx.strategy.splits_over("pipeline")
        for part in () if may_change else ctx.parts:  # else names may refer to later modules or another stage
            self._groups(part)
        ignored = () if may_change else [parameter for part in ctx.parts for parameter in self._ignored(part)]
        need_own_code(ctx, self.name)
        need_dense_gradients(ctx, self.name, ignored)
        need_real_parameters(ctx, self.name, "of which it makes no shards", ignored)
        need_own_storage(ctx, self.name, lambda values: torch.chunk(values, 2), ignored)

    def apply(self, ctx: Context) -> Context:
        from atorch.distributed.host_memory import is_simulated
        from atorch.runtime.fsdp.groups import arrange
        from atorch.runtime.fsdp.shard import shard
        from atorch.runtime.fsdp.sharded_access import step_as_ordinary

        settled = self.settled(ctx.root)
        if settled is not self:
            return settled.apply(ctx)
        self.check(ctx)
        mesh = self._mesh(ctx)
        precision = self.mixed_precision
        if precision is None and ctx.compute_dtype is not None:
            precision = MixedPrecision(param_dtype=short_name(ctx.compute_dtype), reduce_dtype="fp32")
        precision = precision or MixedPrecision()
        on_host: list[nn.Parameter] = []
        offload = ctx.strategy.get(Offload)
        offloaded = max(float(self.cpu_offload), 0.0 if offload is None else offload.parameters)
        if offloaded and not is_simulated(ctx.parts):
            _need_host(ctx, offloaded, mesh.size(mesh.ndim - 1))
        for part in ctx.parts:
            precision.cast_buffers(part)
            on_host += shard(
                part,
                mesh,
                arrange(part, self._groups(part)),
                ignored=self._ignored(part),
                mp_policy=precision.policy(),
                root_mp_policy=precision.policy(root=True),
                reshard_after_forward=False if self.sharding_strategy in KEEPING else self.reshard_after_forward,
                offload=offloaded,
                forward_prefetch=self.forward_prefetch,
                sync_module_states=self.sync_module_states,
                fills_meta=False,
                find_unused_parameters=ctx.find_unused_parameters,
                is_agreed=True,
            )
        if ctx.compute_dtype is None and precision.param_dtype is not None:
            ctx = replace(ctx, compute_dtype=torch_dtype(precision.param_dtype))
        if (make := ctx.make_optimizer) is not None:
            ctx = replace(ctx, make_optimizer=lambda groups: step_as_ordinary(make(groups)))
        return replace(ctx, on_host=(*ctx.on_host, *on_host))

    def _mesh(self, ctx: Context) -> DeviceMesh:
        mesh = ctx.need_mesh()
        if self.sharding_strategy == "NO_SHARD":
            unit_axis = next((axis for axis in ("zero", "tensor", "pipeline", "context") if mesh.size(axis) == 1), None)
            if unit_axis is None:
                raise StrategyError(
                    f"{self.name} was given NO_SHARD, and parallel_mode splits over every axis; use ddp"
                )
            return mesh.joined_mesh([axis for axis in REPLICA_AXES if axis != unit_axis], (unit_axis,))
        if mesh.size("data") > 1 and mesh.size("zero") > 1:
            return mesh.joined_mesh(("data",), [axis for axis in REPLICA_AXES if axis != "data"])
        return mesh.joined_mesh(REPLICA_AXES)

    def _groups(self, part: nn.Module) -> list[FsdpUnit]:
        from atorch.model.structure import find_modules
        from atorch.runtime.fsdp.groups import FsdpUnit, by_block, by_size, without_trainable

        if self.atorch_wrap_cls:
            named = find_modules(part, self.atorch_wrap_cls, f"{self.name} atorch_wrap_cls")
            groups = [FsdpUnit((module,)) for module in named.values()]
        elif self.atorch_size_based_min_num_params is not None:
            groups = [FsdpUnit((module,)) for module in by_size(part, self.atorch_size_based_min_num_params)]
        else:
            groups = by_block(part)
        return without_trainable(groups) if self.wrap_trainable_outmost else groups

    def _ignored(self, part: nn.Module) -> list[nn.Parameter]:
        parameters = dict(part.named_parameters(remove_duplicate=False))
        modules = self._named_as_ignored(part)
        named = [parameters[name] for name in self.atorch_ignored_cls if name in parameters]
        return [*named, *(parameter for module in modules for parameter in module.parameters())]


def _itemsize(dtype: str) -> float:
    return 4.0 if dtype == "fp32" else 2.0


def _need_host(ctx: Context, share: float, num_shards: int) -> None:
    """Check that host memory has room for shards of parameters, their gradients and optimizer states."""
    from atorch.distributed.host_memory import need_host_memory

    parameters = [parameter for part in ctx.parts for parameter in part.parameters()]
    released = sum(parameter.nbytes for parameter in parameters if parameter.device.type == "cpu")
    states = state_bytes(ctx)
    training_bytes = [parameter.itemsize + states if parameter.requires_grad else 0.0 for parameter in parameters]
    needed = sum(p.numel() * (p.itemsize + more) for p, more in zip(parameters, training_bytes, strict=True))
    need_host_memory(
        share * needed / num_shards - released,
        "what fsdp keeps there (shards of parameters, gradients and optimizer states)",
        "Leave cpu_offload out, use more processes, or take chunk, which keeps to a budget and has disk",
    )
