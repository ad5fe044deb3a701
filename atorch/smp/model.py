"""`smp.DistributedModel`: a model partitioned over the processes."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from atorch.errors import ArgumentError, check_bools, shown
from atorch.logs import logger, verbose_logging
from atorch.runtime.data_parallel.buckets import gathered
from atorch.runtime.optimizer.held_tensors import held_tensors
from atorch.runtime.pipeline.stage import STAGE
from atorch.smp.checkpointing import states
from atorch.smp.checkpointing.local_parts import LocalParts
from atorch.smp.checkpointing.states import CUTS, PARTIAL, meet
from atorch.smp.config import ModelOptions
from atorch.smp.session import Session, session
from atorch.smp.tensor.replacement import replace_registered
from atorch.smp.tensor.split import TensorSplit

if TYPE_CHECKING:
    from typing_extensions import Self

    from atorch.smp.partitioning import PartitionChoice
    from atorch.smp.steps.averaging import CommHook
    from atorch.smp.steps.micro_batch_run import MicroBatchRun
    from atorch.smp.steps.runner import Runner


class DistributedModel(LocalParts):
    """A model that is partitioned over the processes of a pipeline when a step first runs.

    Call it and its `backward` inside functions that `smp.step` decorates. Parameters keep the module's names.

    Args:
        module: the whole model to distribute, the same on all processes, on any device.
        trace_device: the device of the sample pass that partitioning uses; the CPU where there is no GPU.
        trace_execution_times: weigh modules by times measured on the GPU, which differ from run to run.
        overlapping_allreduce: average gradients over replicas while backward runs, not at the end of a step.
        backward_passes_per_step: step calls whose gradients accumulate before they are averaged over replicas.
        average_grads_across_microbatches: divide a batch's gradients by the number of micro-batches: right for losses
            that are means over samples, wrong for sums.
        bucket_cap_mb: MiB of gradients in a bucket, which is averaged at once.
        trace_memory_usage: weigh modules by the activations that they keep, not by the size of their outputs.
        broadcast_buffers: broadcast the first replica's buffers at the beginning of a training step.
        gradient_as_bucket_view: make `.grad` a view of its bucket, which saves memory.

    Raises:
        ArgumentError: `smp.init` was not called, there is a model already, an argument is invalid, or a registered
            module cannot be replaced.
    """

    def __init__(
        self, module: nn.Module, trace_device: Literal["cpu", "gpu"] = "gpu", trace_execution_times: bool = False,
        overlapping_allreduce: bool = True, backward_passes_per_step: int = 1,
        average_grads_across_microbatches: bool = True, bucket_cap_mb: float = 25, trace_memory_usage: bool = False,
        broadcast_buffers: bool = True, gradient_as_bucket_view: bool = False,
    ) -> None:  # fmt: skip
        owner = session()
        _check_module(module, owner)
        module = replace_registered(module)
        super().__init__()
        self.options = ModelOptions.checked(
            {
                "trace_device": trace_device, "trace_execution_times": trace_execution_times,
                "overlapping_allreduce": overlapping_allreduce, "backward_passes_per_step": backward_passes_per_step,
                "average_grads_across_microbatches": average_grads_across_microbatches, "bucket_cap_mb": bucket_cap_mb,
                "trace_memory_usage": trace_memory_usage, "broadcast_buffers": broadcast_buffers,
                "gradient_as_bucket_view": gradient_as_bucket_view,
            },
            "smp.DistributedModel",
        )  # fmt: skip
        if trace_device == "gpu" and not torch.cuda.is_available():
            with verbose_logging(True):
                logger.info('trace_device is "gpu", and there is none here: the model is traced on the CPU')
        self.module = module
        self.division: PartitionChoice | None = None
        """The modules on each partition; None before partitioning."""
        self.split = TensorSplit()
        """The parameters that are split over tensor ranks."""
        self._runner: tuple[Runner, ...] = ()  # in a tuple, so that its parts are not found twice
        self._others: tuple[nn.Module, ...] = ()
        self._body: MicroBatchRun | None = None
        self.joins = False
        """True inside `join`: replicas may run different numbers of steps."""
        self.divides_by_all = True
        """True if `join` averages gradients over all replicas, also over those without batches."""
        self.state_names = tuple(module.state_dict())
        """The keys of the whole model's state dict."""
        self._waiting: list[Callable[[], None]] = []
        self._hooks: OrderedDict[int, Callable[..., Any]] = OrderedDict()  # RemovableHandle needs an OrderedDict
        self.comm_hook: tuple[Any, CommHook] | None = None
        owner.model = self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output for the micro-batch of the running step.

        Raises:
            ArgumentError: no step runs.
        """
        if self._body is None:
            raise ArgumentError(
                "the DistributedModel was called outside of smp.step: its parts are on several processes, which run "
                "it together; call it in a function with @smp.step, for evaluation under torch.no_grad() too"
            )
        return self._body.call_model(args, kwargs)

    def backward(
        self, tensors: Any, grad_tensors: Any = None, retain_graph: bool | None = None, create_graph: bool = False,
        retain_grad: bool = False,
    ) -> None:  # fmt: skip
        """Run backward from `tensors` through all parts of the model, when the schedule reaches it.

        Args:
            tensors: one tensor or several; scalars, or of the shapes of `grad_tensors`.

        Raises:
            ArgumentError: no step runs, a tensor is invalid, or an option is set that autograd supports only locally.
        """
        options = {"retain_graph": retain_graph, "create_graph": create_graph, "retain_grad": retain_grad}
        if option := next((f"{name}={value}" for name, value in options.items() if value), None):
            raise ArgumentError(f"model.backward was given {option}; parts of the graph are on other processes")
        if self._body is None:
            raise ArgumentError("model.backward was called outside of smp.step; call it in a function with @smp.step")
        self._body.backward(tensors, grad_tensors)

    @contextmanager
    def serving(self, body: MicroBatchRun) -> Iterator[None]:
        """Route calls of the model to `body` inside the context."""
        before, self._body = self._body, body
        try:
            yield
        finally:
            self._body = before

    @property
    def in_a_step(self) -> bool:
        return self._body is not None

    @property
    def runner(self) -> Runner | None:
        """None before the model is partitioned."""
        return self._runner[0] if self._runner else None

    def get_module(self) -> nn.Module:
        """The wrapped module; once partitioned, the first of the local parts, with the same names."""
        return self.module

    def set_partitioned(self, runner: Runner, division: PartitionChoice, split: TensorSplit) -> None:
        """Take over the parts of `runner` after partitioning and the split over tensor ranks."""
        self._runner, self.division, self.split = (runner,), division, split
        self.module, self._others = runner.parts[0], runner.parts[1:]

    def run_pending(self) -> None:
        """Run the deferred loads, then the hooks, after partitioning."""
        for load in self._waiting:
            load()
        self._waiting.clear()
        optimizer = session().optimizer
        for hook in list(self._hooks.values()):
            hook(*(self, optimizer)[: _num_arguments(hook)])

    def when_partitioned(self, work: Callable[[], None]) -> None:
        """Run `work` now if the model is partitioned, else right after partitioning."""
        if self.partitioned:
            work()
        else:
            self._waiting.append(work)

    def register_post_partition_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Call `hook` after partitioning and before the first forward pass.

        Args:
            hook: a function of nothing, of the model, or of the model and the optimizer.

        Raises:
            ArgumentError: `hook` is not callable, or the model is partitioned already.
        """
        _check_hook("register_post_partition_hook", hook)
        if self.partitioned:
            raise ArgumentError("the model is partitioned already; register hooks before the first smp.step")
        handle = RemovableHandle(self._hooks)
        self._hooks[handle.id] = hook
        return handle

    def register_post_step_hook(self, hook: Callable[..., Any]) -> None:
        """Call `hook` once optimizer states can be loaded: after partitioning, or now if that is done.

        The original calls it after the first step, which then ran without the loss scale of the loaded state.

        Args:
            hook: a function of nothing, of the model, or of the model and the optimizer.

        Raises:
            ArgumentError: `hook` is not callable.
        """
        _check_hook("register_post_step_hook", hook)
        self.when_partitioned(lambda: hook(*(self, session().optimizer)[: _num_arguments(hook)]))

    def register_comm_hook(self, state: Any, hook: CommHook) -> None:
        """Average gradients by `hook(state, bucket)`; communication hooks of DistributedDataParallel work.

        Raises:
            ArgumentError: a hook is registered already, or `hook` is not callable.
        """
        if self.comm_hook is not None:
            raise ArgumentError("register_comm_hook was called before; there is one communication hook")
        _check_hook("register_comm_hook", hook)
        self.comm_hook = state, hook

    @contextmanager
    def join(self, divide_by_initial_world_size: bool = True, enable: bool = True) -> Iterator[None]:
        """Let replicas run different numbers of steps; a finished one adds zeros to the others' gradients.

        Args:
            divide_by_initial_world_size: average over all replicas, not only over those that still have batches.

        Raises:
            ArgumentError: it is nested, or sharded data parallelism is on.
        """
        check_bools("model.join", divide_by_initial_world_size=divide_by_initial_world_size, enable=enable)
        if enable and session().config.sharded_data_parallel_degree > 1:
            raise ArgumentError(
                "model.join() lets replicas take different numbers of steps, and with sharded_data_parallel_degree "
                "above 1 every step is one of all replicas; give all of them as many batches"
            )
        if self.joins:
            raise ArgumentError("model.join() was entered inside of another; once is enough")
        self.joins, self.divides_by_all = enable, divide_by_initial_world_size
        try:
            yield
            if enable and self.runner is not None:
                self.runner.join_remaining()
        finally:
            self.joins = False

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale gradients down if the norm of the whole model's exceeds `max_norm`; returns the norm before.

        The norm equals that of plain training: over all stages, tensor ranks and shards, without the loss scale.
        All processes of a model call it together, after a training step.

        Args:
            max_norm: above 0; infinity leaves the gradients unchanged.
            norm_type: p > 0, or infinity (also "inf") for the largest absolute value.

        Raises:
            ArgumentError: the model is not partitioned yet, or an argument is invalid.
        """
        from atorch.smp.optimizer import clip

        norm = clip(self, self.parameters(), "clip_grad_norm_", max_norm, norm_type)
        if session().optimizer is not None:
            session().optimizer.mark_synced()
        return norm

    def local_state_dict(self) -> dict[str, Any]:
        """The state of the partition of this process, with the key `_smp_is_partial`.

        It communicates only under sharded data parallelism, where all processes call it together.

        Raises:
            ArgumentError: some of them did not call it, which the error lists; or the model is not partitioned yet.
        """
        self._need_partition("local_state_dict")
        state = self._gathered(self, meet("model.local_state_dict()", is_whole=False, states=False))
        return {**state, PARTIAL: True, CUTS: self.split.own_rows(state)}

    def state_dict(self, *args: Any, gather_to_rank0: bool = False, **kwargs: Any) -> Any:
        """The state dict of the whole model, on all processes that hold parts of one replica.

        Args:
            gather_to_rank0: accepted without effect: rank 0 always has the state.

        Raises:
            ArgumentError: some of them did not call it, which the error lists; or `gather_to_rank0` is not a bool.
        """
        check_bools("model.state_dict", gather_to_rank0=gather_to_rank0)
        if not self.partitioned:
            return self.module.state_dict(*args, **kwargs)
        return self._gathered(self.placed(), meet("model.state_dict()", is_whole=True, states=False))

    def load_state_dict(
        self,
        state_dict: Mapping[str, Any],
        strict: bool = True,
        assign: bool = False,
        same_partition_load: bool = False,
    ) -> Any:
        """Load a whole state, or the partial ones of all processes, now or right after partitioning.

        Args:
            assign: accepted without effect: values are copied into the local parts.
            same_partition_load: accepted without effect: partial states of any partition are merged.

        Raises:
            ArgumentError: the state is not a dict, or a flag is not a bool.
            RuntimeError: names or shapes differ. Wrong names are reported at once, also before partitioning.
        """
        check_bools("model.load_state_dict", strict=strict, assign=assign, same_partition_load=same_partition_load)
        if not isinstance(state_dict, Mapping):
            raise ArgumentError(
                f"the model was given {shown(state_dict)} as a state; give what its state_dict returned"
            )
        state = states.merged_state(state_dict, "the model's state")
        self._check_state(state, strict)
        self.when_partitioned(lambda: self._load(state))

    def cpu(self) -> Any:
        """Gather the whole model in host memory on all processes of one replica; no more steps can run."""
        if not self.partitioned:
            self.module.cpu()
            return self
        state = self._gathered(self.placed(), meet("model.cpu()", is_whole=True, states=False))
        assert self.runner is not None
        self.module, self._others = self.runner.blank, ()
        self.module.load_state_dict({name: value.cpu() for name, value in state.items()}, assign=True)
        self.module.cpu()
        self.runner.ended_by = "model.cpu() has put the whole model into host memory, and ended its steps"
        return self

    def _gathered(self, model: Self, group: dist.ProcessGroup) -> dict[str, Any]:
        """The state of `model`, this one or `placed`, of which the processes of `group` have parts."""
        parts = {name: entry.logical() for entry in held_tensors(model) for name in entry.names}
        state = {**self.own_state(), **dict(gathered(parts, group))}
        return {name: state[name] for name in (*self.state_names, *state) if name in state}

    def _check_state(self, state: Mapping[str, Any], strict: bool) -> None:
        unknown, missing = sorted(state.keys() - set(self.state_names)), sorted(set(self.state_names) - state.keys())
        if strict and (unknown or missing):
            by_kind = {"unexpected": unknown, "missing": missing}
            faults = "; ".join(f"{what}: {', '.join(names)}" for what, names in by_kind.items() if names)
            raise RuntimeError(f"the state does not fit {type(self.module).__name__} ({faults})")

    @torch.no_grad()
    def _load(self, state: Mapping[str, Any]) -> None:
        others = dict(state)
        for entry in held_tensors(self.placed()):
            values = [others.pop(name) for name in entry.names if name in others]
            if values and tuple(values[0].shape) != entry.shape:
                raise ArgumentError(
                    f"{entry.name} was given with shape {tuple(values[0].shape)}, and the whole model's is "
                    f"{entry.shape}; give the state of the same model, whole"
                )
            if values:
                entry.write(values[0])
        for part in (self.module, *self._others):  # what is no tensor
            part.load_state_dict({name: others[name] for name in part.state_dict() if name in others}, strict=False)


def _check_module(module: Any, owner: Session) -> None:
    if not isinstance(module, nn.Module):
        raise ArgumentError(f"smp.DistributedModel was given {shown(module)}; give a torch.nn.Module")
    if isinstance(module, DistributedDataParallel):
        raise ArgumentError(
            "smp.DistributedModel was given a DistributedDataParallel; it averages gradients itself: give the module, "
            "and set ddp in the configuration"
        )
    if owner.model is not None:
        raise ArgumentError(
            "a second smp.DistributedModel was made; a script has one: put the modules into one, and call what you need"
        )
    if getattr(module, STAGE, None) is not None or isinstance(module, DistributedModel):
        raise ArgumentError("smp.DistributedModel was given a module that is distributed already")


def _check_hook(call: str, hook: Any) -> None:
    if not callable(hook):
        raise ArgumentError(f"{call} was given {shown(hook)}; give a function")


def _num_arguments(hook: Callable[..., Any]) -> int:
    """The number of arguments out of (model, optimizer) that a hook takes."""
    try:
        parameters = inspect.signature(hook).parameters.values()
    except ValueError:  # a builtin without a signature
        return 2
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return 2
    return min(2, sum(slot.kind in (slot.POSITIONAL_ONLY, slot.POSITIONAL_OR_KEYWORD) for slot in parameters))
