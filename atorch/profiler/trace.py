"""Traces a model and a batch to a ModelProfile: a forward pass and loss on fake tensors, recorded by operation.

A model in fp32 is also traced under `half` and autocast, since a pass in fp32 does not show what stays in fp32 there.

The model itself is never run or changed. Its structure is copied with fake tensors, so a model on the meta device costs
no memory and a real one no time. Of structurally equal blocks one is copied and run. `recording` records operations,
`dataflow` derives the matmuls that tensor parallelism can split, `segments` sums up. A model whose control flow
depends on values cannot run on fake tensors; a copy-on-write copy of it then runs for real.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from atorch.cost import AttentionKind, ModelProfile, Segment
from atorch.distributed.local_collectives import local_collectives
from atorch.distributed.rng import preserved_rng
from atorch.errors import ArgumentError
from atorch.logs import logger, muted
from atorch.model.copy import copy_with, lazy_copy_with
from atorch.model.copy_isolation import OriginalReachedError, Originals
from atorch.model.pytree import batch_size, in_fp32, map_tensors, tensor_bytes, tensors_in
from atorch.model.structure import repeated_blocks
from atorch.model.user_functions import LossFunc, MakeOptimizer, is_elementwise
from atorch.profiler.fakes import as_on
from atorch.profiler.recording import Recorder, TooManyCallsError
from atorch.profiler.repeated_blocks import Blocks, groups_of_alike
from atorch.profiler.segments import Ownership, segments_of
from atorch.profiler.token_dependence import TIMES, UNIT, at_length, extrapolated, watch_outside

CallModel = Callable[[nn.Module, Any], Any]
OfLength = tuple[int, Callable[[int], Any]]
"""Tokens of a sample, and a function that makes a sample of another length."""

MAX_CALLS = 1000  # operations in a block above which shorter samples are traced, if possible
_SIDE = 64  # of the square matrix for test steps of optimizers
_UNFUSED = 0.89  # seconds of a byte over a fused kernel's: AdamW's 20 passes take 2.55 times its 7 on an H200


@dataclass(frozen=True)
class _Job:
    model: nn.Module
    batch: Any
    call_model: CallModel
    loss_func: LossFunc | None
    device_type: str
    blocks: Mapping[str, nn.Module]
    of_length: OfLength | None = None
    max_calls: int = 0
    is_short: bool = False  # True if shorter samples replace the sample
    numbers: Literal["own", "half", "autocast"] = "own"  # the model's own dtypes, or those of a method
    capability: tuple[int, int] | None = None

    @property
    def functions(self) -> tuple[CallModel, LossFunc | None]:
        """The user's functions, which may hold references to the model."""
        return self.call_model, self.loss_func


def trace(
    model: nn.Module,
    sample_batch: Any,
    call_model: CallModel,
    loss_func: LossFunc | None,
    make_optimizer: MakeOptimizer | None = None,
    *,
    device_type: str = "cpu",
    capability: tuple[int, int] | None = None,
    parts: Mapping[str, nn.Module] | None = None,
    num_counts: int = 0,
    of_length: OfLength | None = None,
) -> ModelProfile:
    """The profile of one forward pass of `model` on `sample_batch`, and of its loss.

    Args:
        sample_batch: the batch of `call_model(model, batch)` and `loss_func(batch, output)`, on any device.
        make_optimizer: `(parameters) -> optimizer`, to measure its state; None: two elements a parameter.
        device_type: device to train on, "cpu" or "cuda": some operations save less on a GPU.
        capability: of a CUDA device; it decides if attention there writes its scores.
        parts: disjoint modules; every run of one becomes a segment, and so does everything between two runs. None: the
            repeated blocks, with consecutive equal ones joined to one segment.
        num_counts: figures that ranks exchange each step, since the loss is a mean over labels.
        of_length: makes shorter samples, to trace models that loop over tokens.

    Raises:
        ArgumentError: the model has no parameters, cannot be copied, is on the meta device and cannot run on fakes, or
            reaches its own tensors through globals, which a copy cannot follow.
    """
    if next(model.parameters(), None) is None:
        raise ArgumentError(f"{type(model).__name__} has no parameters; there is nothing to plan")
    blocks = repeated_blocks(model) if parts is None else parts
    job = _Job(model, sample_batch, call_model, loss_func, device_type, blocks, of_length, capability=capability)
    ownership, groups = Ownership.of(model, blocks), groups_of_alike(blocks)
    with preserved_rng():
        job, recorder, traced = _of_length(job, groups)
        narrow = [
            _in_16_bits(variant, groups) if traced else None
            for variant in (replace(job, numbers="half"), replace(job, numbers="autocast"))
        ]
        stepped = None if make_optimizer is None else _stepped_alone(make_optimizer)
    samples, parameters = batch_size(sample_batch), list(model.parameters())
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    segments, in_half, in_autocast = (
        () if record is None else segments_of(record, ownership, samples, joined=parts is None)
        for record in (recorder, *narrow)
    )
    in_half, in_autocast = (others if _are_alike(segments, others) else () for others in (in_half, in_autocast))
    return ModelProfile(
        segments=segments,
        in_half=in_half,
        in_autocast=tuple(map(_with_results, in_autocast, in_half or in_autocast)),
        batch_size=samples,
        num_params=sum(parameter.numel() for parameter in parameters),
        num_trainable=sum(parameter.numel() for parameter in trainable),
        param_bytes=sum(map(tensor_bytes, parameters)),
        trainable_bytes=sum(map(tensor_bytes, trainable)),
        buffer_bytes=sum(map(tensor_bytes, model.buffers())),
        **_of_optimizer(stepped),
        optim_is_elementwise=make_optimizer is None or is_elementwise(None if stepped is None else stepped[0]),
        module_classes=_class_names([model]),
        block_classes=_class_names(repeated_blocks(model).values()),
        attention=_attention(recorder, model),
        num_counts=num_counts,
        kernels=tuple(sorted(recorder.kernels)),
        traced=traced,
    )


def _attention(recorder: Recorder, model: nn.Module) -> AttentionKind:
    if recorder.fused_attention:
        return "fused"
    # Classes of transformers declare that their attention can be replaced.
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention) or getattr(module, "_supports_sdpa", False):
            return "replaceable"
    return "written"


def _class_names(models: Iterable[nn.Module]) -> frozenset[str]:
    return frozenset(type(module).__name__ for model in models for module in model.modules())


def _of_length(job: _Job, groups: Sequence[Sequence[str]]) -> tuple[_Job, Recorder, bool]:
    """Record the pass on the sample, or extrapolate it from shorter samples if that would take long."""
    if job.of_length is None:
        return job, *_run(job, groups)
    length, make = job.of_length
    try:
        return job, *_run(replace(job, max_calls=MAX_CALLS), groups)
    except TooManyCallsError:
        logger.info("the model calls more than %d operations in a block; shorter samples are traced", MAX_CALLS)
    try:
        recorder = extrapolated(lambda size: _once(replace(job, batch=make(size)), groups), length)
        if recorder is not None:
            return replace(job, is_short=True), recorder, True
    except Exception as error:  # a user's model may fail in any way on a short sample
        logger.info("the model does not take shorter samples: %s", error)
    return job, *_run(job, groups)


def _run(job: _Job, groups: Sequence[Sequence[str]]) -> tuple[Recorder, bool]:
    """Record the forward pass on fakes, running one of each group of equal blocks; else every block; else for real.

    User code may fail on fakes in any way, or because equal blocks that do not run leave state for others. A genuine
    fault occurs again in the real run, and is raised there.
    """
    for equal in (groups, ()):
        try:
            return _on_fakes(job, equal), True
        except (OriginalReachedError, TooManyCallsError):
            raise
        except Exception as error:
            fault = error
    if any(parameter.is_meta for parameter in job.model.parameters()):
        raise ArgumentError(
            f"{type(job.model).__name__} is on the meta device and cannot be traced there "
            f"({type(fault).__name__}: {fault}); give the model on a real device"
        ) from fault
    logger.info("the model is traced by a real run, it does not run on fake tensors: %s", fault)
    try:
        return _for_real(job), False
    except OriginalReachedError:
        raise
    except Exception as error:  # a genuine fault, or code that cannot run under recording, such as torch.func.grad
        unrecorded = _for_real(job, is_recorded=False), False
        logger.warning("what the model computes is not known, it does not run while it is recorded: %s", error)
        return unrecorded


def _in_16_bits(job: _Job, groups: Sequence[Sequence[str]]) -> Recorder | None:
    """The pass under `half` or `amp_native`; None for a model that is not in fp32, or fails in 16 bits."""
    if any(parameter.dtype != torch.float32 for parameter in job.model.parameters()):
        return None
    try:
        with muted("torch._subclasses.fake_tensor"):
            return _on_fakes(job, groups)
    except Exception as error:  # a user's model may fail in any way in 16 bits
        logger.info("the memory and time of %s are derived from fp32, as the model fails there: %s", job.numbers, error)
        return None


def _are_alike(segments: tuple[Segment, ...], others: tuple[Segment, ...]) -> bool:
    """True if two passes in different dtypes have the same segments."""
    first, second = (
        [(segment.name, segment.count, segment.is_block, segment.num_params, len(segment.matmuls)) for segment in those]
        for those in (segments, others)
    )
    return first == second


def _with_results(segment: Segment, in_half: Segment) -> Segment:
    """A segment under autocast: selective recomputation keeps a result even if only its cast is saved."""
    results = max(segment.inside.selective_bytes, in_half.inside.selective_bytes)
    return replace(segment, inside=replace(segment.inside, selective_bytes=results))


def _on_fakes(job: _Job, groups: Sequence[Sequence[str]]) -> Recorder:
    if not job.is_short or job.of_length is None:
        return _once(job, groups)
    length, make = job.of_length
    short = [_once(replace(job, batch=make(times * UNIT)), groups) for times in TIMES]
    return at_length(short, length)


def _once(job: _Job, groups: Sequence[Sequence[str]]) -> Recorder:
    from atorch.profiler.fakes import Fakes

    fakes = Fakes(dtype=torch.bfloat16 if job.numbers == "half" else None)
    equal = [[job.blocks[name] for name in group] for group in groups]
    duplicate, functions = copy_with(job.model, job.functions, fakes.fake, equal)
    batch = map_tensors(fakes.fake_unless_known, job.batch)
    return _record(job, duplicate, functions, batch, groups, fakes.running())


def _for_real(job: _Job, is_recorded: bool = True) -> Recorder:
    device = next(job.model.parameters()).device
    batch = map_tensors(lambda tensor: tensor.to(device), job.batch)
    duplicate, functions = lazy_copy_with(job.model, job.functions, device)
    return _record(job, duplicate, functions, batch, (), nullcontext(), is_recorded)


def _record(
    job: _Job,
    duplicate: nn.Module,
    functions: Sequence[Any],
    batch: Any,
    groups: Sequence[Sequence[str]],
    mode: AbstractContextManager[None],
    is_recorded: bool = True,
) -> Recorder:
    call_model, loss_func = functions
    numbers = {name: number for number, (name, _) in enumerate(job.model.named_parameters())}
    weights = {numbers[name]: tensor for name, tensor in duplicate.named_parameters()}
    is_autocast = job.numbers == "autocast"
    recorder = Recorder(weights, duplicate.buffers(), batch, casts_apart=is_autocast, max_calls=job.max_calls)
    blocks = {name: duplicate.get_submodule(name) for name in job.blocks}
    if is_recorded:
        Blocks(recorder, groups).watch(blocks)
        watch_outside(recorder, duplicate, blocks)
    with ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        stack.enter_context(mode)
        stack.enter_context(as_on(job.device_type, job.capability))
        stack.enter_context(recorder.recording() if is_recorded else nullcontext())
        stack.enter_context(Originals(job.model))
        stack.enter_context(local_collectives())  # a single process traces
        with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
            output = call_model(duplicate, batch)
        output = in_fp32(output) if is_autocast else output
        if loss_func is not None:
            with torch.autocast("cpu", torch.bfloat16, enabled=job.numbers != "own"):
                loss_func(batch, output)
    return recorder


def optimizer_state_per_param(make_optimizer: MakeOptimizer) -> float:
    """Elements of state that the optimizer keeps for one element of a parameter: Adam 2, momentum 1, plain SGD 0.

    Measured by one step on a small matrix. Optimizers that cannot step alone (they need a closure or particular
    groups) count as 2.
    """
    stepped = _stepped_alone(make_optimizer)
    return 2.0 if stepped is None else _state_per_param(stepped[0])


def _stepped_alone(make_optimizer: MakeOptimizer) -> tuple[Any, _StepTraffic] | None:
    """An optimizer of a small matrix, and the traffic of its second step; None if it cannot step alone."""
    parameter = nn.Parameter(torch.zeros(_SIDE, _SIDE))
    parameter.grad = torch.ones_like(parameter)
    try:
        optimizer = make_optimizer([parameter])
        optimizer.step()
        with _StepTraffic() as traffic:
            optimizer.step()
    except Exception as error:  # a user's optimizer may refuse in any way, mostly by an assertion
        logger.info("the optimizer's state is taken for two elements a parameter, it cannot step alone: %s", error)
        return None
    return optimizer, traffic


class _StepTraffic(TorchDispatchMode):
    """Counts matrix-sized tensors that operations read and write, and operations that create new ones."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.passes, self.operations, self.new = 0, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        changed = [arg for arg, about in zip(args, func._schema.arguments, strict=False) if about.is_write]
        read, written, results = (
            {id(tensor) for tensor in tensors_in(values) if tensor.numel() == _SIDE**2}
            for values in ((args, kwargs), (changed, out), out)
        )
        self.passes += len(read) + len(written)
        self.operations += bool(read or written)
        self.new += bool(results - read)
        return out


def _of_optimizer(stepped: tuple[Any, _StepTraffic] | None) -> dict[str, Any]:
    """The optimizer's fields of a profile.

    On a GPU torch runs the same operations as on a CPU, each over a list of all parameters.
    """
    if stepped is None:
        return {"optim_state_per_param": 2.0}
    optimizer, traffic = stepped
    state = _state_per_param(optimizer)
    if traffic.operations <= 1:
        return {"optim_state_per_param": state, "optim_temporaries": False}
    return {
        "optim_state_per_param": state,
        "optim_traffic": max(1.0, _UNFUSED * traffic.passes / (2.0 * (1.0 + state) + 1.0)),
        "optim_temporaries": traffic.new > 0,
    }


def _state_per_param(optimizer: Any) -> float:
    return sum(tensor.numel() for tensor in tensors_in(optimizer.state) if tensor.dim() > 0) / _SIDE**2
