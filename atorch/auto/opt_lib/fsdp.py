"""fsdp: parameters, gradients and optimizer states spread over the processes, gathered block by block as they are used.

Memory: (parameters + gradients + optimizer states) / shards, plus about two gathered blocks, embeddings and head.
Communication per step: the parameters all-gathered in forward and again in backward, the gradients reduce-scattered;
where `parallel_mode` has both zero and data, shards over zero, and an all-reduce of the gradient shards over data.
On `fully_shard` (FSDP2); FSDP1's constructor arguments are taken as `runtime/fsdp1_arguments.py` says.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator
from pydantic.json_schema import SkipJsonSchema
from torch import nn
from typing_extensions import Self

from atorch.auto.context import Context
from atorch.auto.opt_lib.offload import parameters_on_host
from atorch.auto.opt_lib.parallel_mode import size_of
from atorch.auto.opt_lib.pipeline_parallel import against_pipeline
from atorch.auto.opt_lib.shared.accumulation import reduce_once
from atorch.auto.opt_lib.shared.model_requirements import (
    changes_modules,
    need_dense_gradients,
    need_own_code,
    need_own_storage,
    need_real_parameters,
)
from atorch.auto.opt_lib.shared.optimizer_compatibility import need_same, state_bytes
from atorch.auto.strategy.method import Method, Phase, method
from atorch.cluster.spec import ClusterSpec
from atorch.compat.fsdp1_arguments import knobs_of, names_within, wrapped_names
from atorch.cost import Cost, ModelProfile
from atorch.cost.parallelism import REPLICA_AXES
from atorch.cost.parallelism import shard as shard_cost
from atorch.distributed.host_memory import is_simulated, need_host_memory
from atorch.errors import StrategyError
from atorch.model.structure import find_modules, module_names
from atorch.runtime.fsdp.groups import FsdpUnit, arrange, by_block, by_size, without_trainable
from atorch.runtime.fsdp.shard import shard
from atorch.runtime.fsdp.sharded_access import step_as_ordinary

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

SETTLED = ("auto_wrap_policy", "ignored_modules")
KEEPING = ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2")
DTYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_NAMES: Mapping[Any, str] = {
    **{dtype: name for name, dtype in DTYPES.items()},
    **{str(dtype): name for name, dtype in DTYPES.items()},
    **{str(dtype).removeprefix("torch."): name for name, dtype in DTYPES.items()},
}


def _as_name(value: Any) -> Any:
    return _NAMES.get(value, value) if isinstance(value, (str, torch.dtype)) else value


Dtype = Annotated[Literal["fp32", "fp16", "bf16"], BeforeValidator(_as_name)]


class MixedPrecision(BaseModel):
    """Types by what they are for; None leaves the parameters' own."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    param_dtype: Dtype | None = None
    """Of gathered parameters, so of forward and backward."""
    reduce_dtype: Dtype | None = None
    """Of the gradients' reduction; None: param_dtype."""
    output_dtype: Dtype | None = None
    """The type of the outputs of gathered modules."""
    buffer_dtype: Dtype | None = None
    """The type that floating-point buffers are cast to, once."""
    cast_forward_inputs: bool = True
    """Cast the inputs of every gathered module to param_dtype."""
    cast_root_forward_inputs: bool = True
    """Cast the inputs of the model."""

    @classmethod
    def of_compute(cls, dtype: torch.dtype) -> Self:
        """Compute in `dtype`, reduce in fp32."""
        return cls(param_dtype=_NAMES[dtype], reduce_dtype="fp32")

    @staticmethod
    def from_torch(value: Any) -> Any:
        """torch's MixedPrecision and MixedPrecisionPolicy as dicts of what they say; anything else as it is.

        Raises:
            ValueError: a setting of FSDP1's that FSDP2 cannot follow.
        """
        if not is_dataclass(value) or isinstance(value, type):
            return value
        said = {each.name: getattr(value, each.name) for each in fields(value)}
        if said.pop("keep_low_precision_grads", False):
            raise ValueError("keep_low_precision_grads: FSDP2 keeps gradients in the parameters' type; leave it out")
        classes = said.pop("_module_classes_to_ignore", ())
        if any(cls is not nn.modules.batchnorm._BatchNorm for cls in classes):
            raise ValueError("_module_classes_to_ignore: FSDP2 has one precision for all; use atorch_ignored_cls")
        # Settings that are not known here, as newer versions of torch have them, say nothing as long as they are unset.
        unset = {each.name for each in fields(value) if said.get(each.name) == each.default}
        return {name: what for name, what in said.items() if name in MixedPrecision.model_fields or name not in unset}

    def policy(self, *, root: bool = False) -> MixedPrecisionPolicy:
        """torch's policy, of the root or of all others."""
        from torch.distributed.fsdp import MixedPrecisionPolicy

        return MixedPrecisionPolicy(
            param_dtype=self.param_dtype and DTYPES[self.param_dtype],
            reduce_dtype=self.reduce_dtype and DTYPES[self.reduce_dtype],
            output_dtype=self.output_dtype and DTYPES[self.output_dtype],
            cast_forward_inputs=self.cast_root_forward_inputs if root else self.cast_forward_inputs,
        )

    def cast_buffers(self, model: nn.Module) -> None:
        """Cast the floating-point buffers to buffer_dtype, where that is given."""
        if self.buffer_dtype is None:
            return
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.is_floating_point():
                    module._buffers[name] = buffer.to(DTYPES[self.buffer_dtype])


@method("fsdp", phase=Phase.SHARD, slot="data_parallel")
class Fsdp(Method):
    """Shard parameters, gradients and optimizer states."""

    needs_replicas: ClassVar[bool] = True

    atorch_wrap_cls: tuple[str, ...] = ()
    """Classes or names of the modules that are gathered as one, exactly these; none: the repeated blocks, the
    embeddings and the head."""
    atorch_size_based_min_num_params: int | None = Field(default=None, ge=1)
    """Gather as one the smallest modules with at least this many parameters, instead."""
    atorch_ignored_cls: tuple[str, ...] = ()
    """Classes or names of modules, or names of parameters, that stay whole on every process."""
    wrap_trainable_outmost: bool = False
    """Gather all that trains as one group, once a step, and only what is frozen block by block: for LoRA."""
    sharding_strategy: (
        Literal["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2", "NO_SHARD"] | None
    ) = None
    """FSDP1's name for what is freed after forward; the HYBRID ones insist on the axes zero and data, and under
    NO_SHARD all stays whole."""
    reshard_after_forward: bool | int | None = None
    """Free gathered parameters after forward, keep them for backward, or keep them over this many processes. None:
    free blocks, keep embeddings, head and root."""
    mixed_precision: MixedPrecision | None = None
    """Types of gathered parameters and of the reduction; None: the precision method's, reducing in fp32."""
    cpu_offload: bool = False
    """Keep shards, gradients and optimizer states in host memory."""
    forward_prefetch: bool = False
    """Issue each group's all-gather before the forward pass of the group before it."""
    sync_module_states: bool = False
    """Broadcast rank 0's parameters and buffers group by group; auto_accelerate has compared them all before that."""
    auto_wrap_policy: SkipJsonSchema[Any] = Field(default=None, exclude=True, repr=False)
    """A function or policy of FSDP1's, asked on the model: the names of what it wraps become atorch_wrap_cls."""
    ignored_modules: SkipJsonSchema[tuple[Any, ...]] = Field(default=(), exclude=True, repr=False)
    """Modules and parameters of the model; their names are added to atorch_ignored_cls."""
    param_init_fn: SkipJsonSchema[Any] = Field(default=None, exclude=True, repr=False)
    """Fills modules on the meta device, as `auto_accelerate`'s argument of this name does; no file can hold it."""

    @classmethod
    def of(cls, config: Any = None) -> Self:
        """Also takes FSDP1's constructor arguments, and `fsdp_wrap_params_outmost` for `wrap_trainable_outmost`."""
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

    @field_validator("mixed_precision", mode="before")
    @classmethod
    def _torch_object(cls, value: Any) -> Any:
        return MixedPrecision.from_torch(value)

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
        """With names of the model's modules in place of a policy, modules and parameters."""
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
        parameters = dict(model.named_parameters(remove_duplicate=False))
        names = [name for name in self.atorch_ignored_cls if name not in parameters]
        return list(find_modules(model, names, f"{self.name} atorch_ignored_cls").values())

    @property
    def splits(self) -> tuple[str, ...]:
        """The axis zero, in which the shards stay where the mesh has data, too."""
        return ("zero",)

    def unfit(self, cost: Cost) -> str | None:
        return against_pipeline(self, cost.stages, cost.schedule)

    def cost(self, cost: Cost) -> Cost:
        """Shards of everything, and the gathered parameters that are whole at one moment.

        Those are all of them where they are kept for backward, else two blocks (one is prefetched) and what is outside
        of blocks; the gradients of a block are whole until they are reduced, in fp32.
        """
        is_hybrid = cost.size("data") > 1 and cost.size("zero") > 1
        replicas: tuple[str, ...] = ("data",) if is_hybrid else ()
        if self.sharding_strategy == "NO_SHARD":
            replicas = REPLICA_AXES
        gathered, reduced = self._itemsizes(cost)
        cost = shard_cost(
            cost,
            axes=tuple(axis for axis in REPLICA_AXES if axis not in replicas),
            replicas=replicas,
            itemsize=gathered,
            reduced_itemsize=reduced,
            keeps_gathered=self.reshard_after_forward is False or self.sharding_strategy in KEEPING,
        )
        if self.cpu_offload:
            cost = cost.but(param_offload=1.0, optim_offload=1.0)
        return reduce_once(cost)

    def _itemsizes(self, cost: Cost) -> tuple[float, float]:
        """Bytes of a gathered and of a reduced element: the precision method's and fp32, unless they are given."""
        precision = self.mixed_precision or MixedPrecision()
        gathered = cost.param_itemsize if cost.dtype == "float32" else 2.0
        if precision.param_dtype is not None:
            gathered = float(DTYPES[precision.param_dtype].itemsize)
        reduced = precision.reduce_dtype or precision.param_dtype
        return gathered, 4.0 if reduced is None else float(DTYPES[reduced].itemsize)

    @classmethod
    def choices(cls, profile: ModelProfile, cluster: ClusterSpec) -> Iterable[Self]:
        """As it is: wrapped at the model's repeated blocks."""
        if cluster.world_size > 1:
            yield cls()

    def check_optimizer(self, ctx: Context) -> None:
        """The optimizer computes on DTensors what it does on plain parameters."""
        need_same(ctx, self.name, "sharded")

    def check(self, ctx: Context) -> None:
        """The mesh has the axes and the model the modules that were named; gradients are dense."""
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
        asked = self.reshard_after_forward
        shards = size_of(ctx, *(axis for axis in REPLICA_AXES if axis != "data" or not is_hybrid))
        shards = 1 if self.sharding_strategy == "NO_SHARD" else shards
        if not isinstance(asked, bool) and asked is not None and (not 1 < asked < shards or shards % asked):
            raise StrategyError(
                f"{self.name}.reshard_after_forward was given {asked}; parameters are spread over {shards} processes, "
                "and it must be a divisor of that other than 1 and itself, or True or False"
            )
        named = ctx.strategy is not None and (changes_modules(ctx) or "pipeline_parallel" in ctx.strategy.names())
        for part in () if named else ctx.parts:  # else names may mean what is not there yet, or is of another stage
            self._groups(part)
        ignored = () if named else [each for part in ctx.parts for each in self._ignored(part)]
        need_own_code(ctx, self.name)
        need_dense_gradients(ctx, self.name, ignored)
        need_real_parameters(ctx, self.name, "of which it makes no shards", ignored)
        need_own_storage(ctx, self.name, lambda values: torch.chunk(values, 2), ignored)

    def apply(self, ctx: Context) -> Context:
        settled = self.settled(ctx.root)
        if settled is not self:
            return settled.apply(ctx)
        self.check(ctx)
        mesh = self._mesh(ctx)
        precision = self.mixed_precision
        if precision is None and ctx.compute_dtype is not None:
            precision = MixedPrecision.of_compute(ctx.compute_dtype)
        precision = precision or MixedPrecision()
        waiting: list[nn.Parameter] = []
        offloaded = max(float(self.cpu_offload), parameters_on_host(ctx.strategy))
        if offloaded and not is_simulated(ctx.parts):
            _need_host(ctx, offloaded, mesh.size(mesh.ndim - 1))
        for part in ctx.parts:
            precision.cast_buffers(part)
            waiting += shard(
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
            ctx = replace(ctx, compute_dtype=DTYPES[precision.param_dtype])
        if (make := ctx.make_optimizer) is not None:
            ctx = replace(ctx, make_optimizer=lambda groups: step_as_ordinary(make(groups)))
        return replace(ctx, on_host=(*ctx.on_host, *waiting))

    def _mesh(self, ctx: Context) -> DeviceMesh:
        mesh = ctx.need_mesh()
        if self.sharding_strategy == "NO_SHARD":
            alone = next((axis for axis in ("zero", "tensor", "pipeline", "context") if mesh.size(axis) == 1), None)
            if alone is None:
                raise StrategyError(
                    f"{self.name} was given NO_SHARD, and parallel_mode splits over every axis; use ddp"
                )
            return mesh.joined_mesh([axis for axis in REPLICA_AXES if axis != alone], (alone,))
        if mesh.size("data") > 1 and mesh.size("zero") > 1:
            return mesh.joined_mesh(("data",), [axis for axis in REPLICA_AXES if axis != "data"])
        return mesh.joined_mesh(REPLICA_AXES)

    def _groups(self, part: nn.Module) -> list[FsdpUnit]:
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


def _need_host(ctx: Context, share: float, num_shards: int) -> None:
    """Check that host memory has room for shards of parameters, their gradients and optimizer states."""
    parameters = [each for part in ctx.parts for each in part.parameters()]
    released = sum(each.nbytes for each in parameters if each.device.type == "cpu")
    states = state_bytes(ctx)
    beside = [each.itemsize + states if each.requires_grad else 0.0 for each in parameters]
    taken = sum(each.numel() * (each.itemsize + more) for each, more in zip(parameters, beside, strict=True))
    need_host_memory(
        share * taken / num_shards - released,
        "what fsdp keeps there (shards of parameters, gradients and optimizer states)",
        "Leave cpu_offload out, use more processes, or take chunk, which keeps to a budget and has disk",
    )
