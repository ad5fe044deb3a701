"""The context of a strategy: the user's model, and the functions that build the objects around it.

A method returns a new Context and does not change its argument, except for the modules in `parts`, which the Context
owns. Applying methods builds nothing; `build` makes optimizer, loader and scheduler once, at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping, MutableSet
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from atorch.auto.strategy import Strategy
from atorch.cluster.spec import ClusterSpec
from atorch.cost import ModelProfile
from atorch.cost.parallelism import REPLICA_AXES
from atorch.distributed.collectives import world_group
from atorch.distributed.mesh import BATCH_AXES, Mesh
from atorch.distributed.world import World
from atorch.errors import ArgumentError
from atorch.model.deferred_init import ValueSource, give_values
from atorch.model.meta_device import give_memory, unfilled
from atorch.model.other_modules import OtherModules
from atorch.model.user_functions import LossFunc
from atorch.runtime.chunk.parameter import ChunkedParameter
from atorch.runtime.data.loader import Loader, shares_out
from atorch.runtime.gradients.backward import OtherGradients
from atorch.runtime.gradients.clip import ClippingModel, add_clipping, parts_of
from atorch.runtime.gradients.norm_guard import SCALED, guard_gradients
from atorch.runtime.loss.reduction import LossWeight, Rule, tolerance_of
from atorch.runtime.loss.rescaling import LossRescaler, RescaledLoss, num_counts
from atorch.runtime.memory.deferred_output import Deferred
from atorch.runtime.optimizer.held_tensors import write_part
from atorch.runtime.optimizer.user_optimizer import keep_to
from atorch.runtime.precision.master_weights import let_take_masters
from atorch.runtime.tensor_parallel.model_layout import rows_of
from atorch.runtime.tensor_parallel.state import need_whole_to_save, refuse_other_parts, warn_of_part

if TYPE_CHECKING:
    from atorch.auto.reference_step import ReferenceStep
    from atorch.checkpoint.files import BackgroundWriter
    from atorch.runtime.tensor_parallel import ModelLayout

ParamGroups = Iterable[torch.Tensor] | Iterable[dict[str, Any]]


def _unscaled() -> float:
    return 1.0


@dataclass(frozen=True, kw_only=True)
class Built:
    """The user's objects, as the `finish` functions complete them."""

    model: nn.Module
    parts: tuple[nn.Module, ...]  # `model` is the first, until a pipeline makes one model of them
    optim: Optimizer | None
    dataloader: DataLoader[Any] | None
    loss_func: LossFunc | None
    prepare_input: Callable[[Any, Any], Any]
    args: Mapping[str, bool]
    loss_scale: Callable[[], float] = _unscaled  # factor of gradients until the optimizer steps
    step: Callable[[Any, Any], Any] | None = None  # (batch, output) → loss: a backend's own whole step
    rescales_loss: bool = False  # True if loss_func already rescales each rank's loss (`loss.rescaling`)


@dataclass(frozen=True)
class ModelFacts:
    """Facts of an accelerated model for clipping and saving, kept on the model as `_atorch`."""

    mesh: Mesh | None = None
    loss_scale: Callable[[], float] = _unscaled
    layout: ModelLayout | None = None  # the split of parameters over the axis tensor

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelFacts:
        return self  # a copy of the model lives on the same processes

    def __reduce__(self) -> tuple[Any, ...]:
        return ModelFacts, ()  # process groups and optimizers do not travel


class _Fields(NamedTuple):
    model: nn.Module
    optim: Any
    dataloader: Any
    loss_func: Any
    prepare_input: Any
    args: dict[str, bool]


class AccelerateResult(_Fields):
    """The six documented fields, in order, and the attributes `lr_scheduler` and `step`."""

    lr_scheduler: Any
    step: Callable[[Any], Any]
    checkpoint_writer: BackgroundWriter | None = None


@dataclass(frozen=True, kw_only=True)
class Context:
    """A model during acceleration, with the functions that build its optimizer, loader and scheduler."""

    root: nn.Module  # the user's model, or the candidate's copy of it
    parts: tuple[nn.Module, ...]  # one module per local pipeline stage; plain: (root,)
    world: World
    cluster: ClusterSpec
    mesh: Mesh | None = None
    compute_dtype: torch.dtype | None = None  # of matmuls, if a precision method set one
    find_unused_parameters: bool = False
    strategy: Strategy = Strategy()  # the one that is being applied, for methods that depend on the others

    make_param_groups: Callable[[tuple[nn.Module, ...]], ParamGroups]
    make_optimizer: Callable[[ParamGroups], Optimizer] | None = None
    make_loader: Callable[[int, int], DataLoader[Any]] | None = None  # (rank, size) of the batch axes → loader
    make_scheduler: Callable[[Optimizer], Any] | None = None
    loss_func: LossFunc | None = None
    loss_weight: Rule = "auto"  # the rule that combines the losses of parts of a batch: see LossWeight
    prepare_input: Callable[[Any, Any], Any]
    call_model: Callable[[nn.Module, Any], Any]  # (model, prepared batch) → output
    finish: tuple[Callable[[Built], Built], ...] = ()
    args: Mapping[str, bool] = field(default_factory=dict)

    sample_batch: Any = None
    plain_pass: ReferenceStep | None = None  # plain training's first pass, to compare strategies with
    profile: ModelProfile | None = None
    layout: ModelLayout | None = None  # the split of parameters over the axis tensor
    on_host: tuple[torch.Tensor, ...] = ()  # parameters and other tensors in host memory
    loss_scale: Callable[[], float] = _unscaled  # factor of gradients until the optimizer steps
    fp32_values: MutableMapping[torch.Tensor, torch.Tensor] = field(default_factory=dict)  # parameter → value
    initial: ValueSource | None = None  # of a model on the meta device; None if it has values, or gets none
    rescalers: list[LossRescaler] = field(default_factory=list)  # of what was built, by kind of batch
    seen: MutableMapping[str, Any] = field(default_factory=dict)  # observations of the model, shared by all candidates
    other_modules: OtherModules = field(default_factory=OtherModules)  # that loss_func and prepare_input reach
    other_gradients: OtherGradients = field(default_factory=OtherGradients)  # to restore after trial passes
    already_warned: MutableSet[str] = field(default_factory=set)  # warnings already given, at most once a job
    metadata: Mapping[str, Any] = field(default_factory=dict)  # JSON data for the metadata of a saved strategy

    @property
    def device(self) -> torch.device:
        return self.world.device

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The mesh's axes whose ranks see different samples and that are larger than 1."""
        return tuple(axis for axis in BATCH_AXES if self.mesh is not None and self.mesh.size(axis) > 1)

    def need_mesh(self) -> Mesh:
        """The mesh; one of a single process if there is none."""
        return self.mesh or Mesh((("data", 1),), None, self.device.type, self.world.timeout)

    def with_finish(self, finish: Callable[[Built], Built]) -> Context:
        """This context with one more function to call when everything is built."""
        return replace(self, finish=(*self.finish, finish))

    def build(self) -> AccelerateResult:
        """Build optimizer, loader and scheduler, call the `finish` functions and bind the result."""
        self.give_memory()
        for part in self.parts:
            _move(part, self.device)
        if self.initial is not None:
            give_values(self.initial, self.parts, self.device, self._writer())
        optim = None if self.make_optimizer is None else self.make_optimizer(self.make_param_groups(self.parts))
        built = Built(
            model=self.parts[0],
            parts=self.parts,
            optim=optim,
            dataloader=self._build_loader(),
            loss_func=self.loss_func,
            prepare_input=self.prepare_input,
            args={"use_optim_backward": False, "requires_set_gradient_accumulation_boundary": False, **self.args},
        )
        for finish in self.finish:
            built = finish(built)
        if built.loss_func is not None and self.batch_axes and not built.rescales_loss:
            built = replace(built, loss_func=self._weighted(built.model, built.loss_func, built.dataloader))
        binding = ModelFacts(self.mesh, built.loss_scale, self.layout)
        for marked in (self.root, built.model):
            object.__setattr__(marked, "_atorch", binding)
        let_take_masters(built.optim)
        add_clipping(built.model)
        self._guard_gradients(built, binding)
        self._warn_of_part(built.model, built.optim)
        if built.optim is not None and self.mesh is not None and self.mesh.size(*REPLICA_AXES) > 1:
            keep_to(built.model, built.optim)
        scheduler = None
        if self.make_scheduler is not None and built.optim is not None:
            scheduler = self.make_scheduler(built.optim)
        return self._result(built, scheduler)

    def _warn_of_part(self, model: nn.Module, optim: Optimizer | None) -> None:
        """Mark the model as partial, for saving, if this process has only a part of it."""
        is_sharded = any(hasattr(tensor, "placements") for tensor in model.parameters())
        is_staged = self.mesh is not None and self.mesh.size("pipeline") > 1
        if is_staged:
            warn_of_part(model, "the stages of this process")
        elif self.layout is not None and not is_sharded:
            warn_of_part(model, "this process's rows of split parameters")
        if is_staged or is_sharded or self.layout is not None:
            need_whole_to_save(self.root)
            refuse_other_parts(self.parts if is_staged else [self.root], optim, self.layout, is_staged)

    def _guard_gradients(self, built: Built, binding: ModelFacts) -> None:
        """Make gradients refuse computations, such as norms, whose result would differ from plain training's."""
        parameters = dict(built.model.named_parameters())
        is_scaled = built.loss_scale is not _unscaled
        if is_scaled:
            why = SCALED
        elif self.mesh is not None and self.mesh.size("pipeline") > 1:
            why = "is of one stage, and other processes have those of the other stages"
        elif isinstance(built.model, ClippingModel):
            why = "is on the process that steps it, which has no others"
        elif self.layout is not None:
            why = "is one of those that the processes of the axis tensor have parts of"
            split = parts_of(built.model, binding)
            parameters = {name: parameter for name, parameter in parameters.items() if parameter in split}
        else:
            return
        guard_gradients(why, parameters, built.model, built.optim, is_whole=not is_scaled and self.layout is None)

    def give_memory(self, make: Callable[[torch.Tensor, torch.device], torch.Tensor] = unfilled) -> None:
        """Allocate parameters and buffers that are still on the meta device; `build` writes their values.

        make: returns a tensor's replacement on the device; by default it allocates memory.
        """
        give_memory(self.parts, lambda tensor: make(tensor, self.device))

    def _writer(self) -> Callable[[tuple[str, ...], torch.Tensor, torch.Tensor], None]:
        """A function that writes this process's part of a whole value into the parameter with these names."""
        cut = {} if self.layout is None else self.layout.rows  # computed once: `rows` traverses the model
        rank = self.need_mesh().rank("tensor") if cut else 0

        def write(names: tuple[str, ...], target: torch.Tensor, value: torch.Tensor) -> None:
            rows = rows_of(names, cut)
            write_part(names, target, value, rows, rank)
            keeps_exact = isinstance(target, ChunkedParameter) or hasattr(target, "placements")
            if target.requires_grad and value.dtype != target.dtype and not keeps_exact:
                self.fp32_values[target] = (value if rows is None else rows.take(value, rank)).detach().clone()

        return write

    def rescaler(self, rule: LossWeight, loader: DataLoader[Any] | None) -> LossRescaler | None:
        """The weight of this rank's loss among those of ranks with other samples; None if there are no such ranks.

        loader: the job's loader, which gives every rank equally many rows.
        """
        if not self.batch_axes:
            return None
        group = self.need_mesh().group(*BATCH_AXES)
        weight = LossRescaler(rule, group, lambda rows: shares_out(loader, rows), self.already_warned)
        self.rescalers.append(weight)
        return weight

    def num_counts(self, batch: Any) -> int:
        """Number of values that ranks with different samples exchange in each step to weight their losses."""
        return num_counts(self.loss_weight, batch)

    def _weighted(self, model: nn.Module, loss_func: LossFunc, loader: DataLoader[Any] | None) -> LossFunc:
        def make() -> LossRescaler:
            weight = self.rescaler(LossWeight(self.loss_weight, tolerance_of(self.compute_dtype)), loader)
            assert weight is not None, "there are several ranks"
            return weight

        return RescaledLoss(model, loss_func, make)

    def _build_loader(self) -> DataLoader[Any] | None:
        if self.make_loader is None:
            return None
        mesh = self.need_mesh()
        loader = self.make_loader(mesh.rank(*BATCH_AXES), mesh.size(*BATCH_AXES))
        if isinstance(loader, Loader) and loader.is_part:
            loader.group = world_group()
        return loader

    def _result(self, built: Built, scheduler: Any) -> AccelerateResult:
        result = AccelerateResult(
            built.model, built.optim, built.dataloader, built.loss_func, built.prepare_input, dict(built.args)
        )
        result.lr_scheduler = scheduler
        result.step = _make_step(result, self.call_model, self.device, built.step)
        return result


def _move(part: nn.Module, device: torch.device) -> None:
    """Move plain tensors to the device; sharding itself places what it shards, also on the host or from meta."""
    tensors = [tensor for tensor in (*part.parameters(), *part.buffers()) if not hasattr(tensor, "placements")]
    if any(tensor.device != device and not tensor.is_meta for tensor in tensors):
        part.to(device)


def _make_step(
    result: AccelerateResult,
    call_model: Callable[[nn.Module, Any], Any],
    device: torch.device,
    own: Callable[[Any, Any], Any] | None,
) -> Callable[[Any], Any]:
    """A function that takes one training step on a batch and returns the detached loss; `own` is a backend's step."""
    model, optim, _, loss_func, prepare_input, args = result
    missing = None
    if optim is None or loss_func is None:
        missing = "step takes a whole training step; give auto_accelerate optim_func and loss_func"
    elif isinstance(result.lr_scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        missing = (
            "step cannot step ReduceLROnPlateau, which asks for a metric; train with model, loss_func and optim, and "
            "give the scheduler's step() a value that all processes share"
        )

    def step(batch: Any) -> Any:
        if missing is not None:
            raise ArgumentError(missing)
        batch = prepare_input(batch, device)
        output = call_model(model, batch)
        try:
            loss = (own or loss_func)(batch, output)
        except (TypeError, AttributeError):
            if isinstance(output, Deferred):
                with torch.no_grad():
                    call_model(model, batch)  # runs at once, and raises if the batch does not fit the model
            raise
        value = loss[0] if isinstance(loss, (list, tuple)) else loss
        if own is None:
            if args["use_optim_backward"]:
                optim.backward(value)
            else:
                value.backward()
            optim.step()
            optim.zero_grad()
        if result.lr_scheduler is not None:
            result.lr_scheduler.step()
        return value.detach()

    return step
