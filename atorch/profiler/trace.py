"""A model and a batch to a ModelProfile: one forward pass and loss on fake tensors, counted operation by operation.

The model is never run and never touched: its structure is copied with fake tensors in place of its own, so a model on
the meta device costs no memory and a real one no time. Operations are counted below autograd, where matrix
multiplications, attention and everything else can be told apart; what backward needs is seen by saved-tensor hooks.
A model whose control flow depends on values cannot run on fakes; a copy-on-write copy of it then runs for real.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from atorch.blocks import repeated_blocks
from atorch.cost import ModelProfile, Region, Segment
from atorch.distributed.rng import preserved_rng
from atorch.errors import ArgumentError
from atorch.logs import logger
from atorch.profiler.copying import copy_structure, lazy_copy
from atorch.profiler.counting import Count, Counter
from atorch.profiler.tensors import batch_size, map_tensors, tensor_bytes, tensors_of

CallModel = Callable[[nn.Module, Any], Any]
LossFunc = Callable[[Any, Any], Any]
MakeOptimizer = Callable[[Any], Any]


def trace(
    model: nn.Module,
    sample_batch: Any,
    call_model: CallModel,
    loss_func: LossFunc | None,
    make_optimizer: MakeOptimizer | None = None,
) -> ModelProfile:
    """What one forward pass of `model` on `sample_batch`, and its loss, do and keep.

    Args:
        sample_batch: what `call_model(model, batch)` and `loss_func(batch, output)` take; its tensors may be anywhere.
        make_optimizer: `(parameters) -> optimizer`, asked what state it keeps; without one, two elements a parameter.

    Raises:
        ArgumentError: the model has no parameters, cannot be copied, or is on the meta device and cannot run on fakes.
    """
    if next(model.parameters(), None) is None:
        raise ArgumentError(f"{type(model).__name__} has no parameters; there is nothing to plan")
    with preserved_rng():
        try:
            counter, traced = _on_fakes(model, sample_batch, call_model, loss_func), True
        except Exception as error:  # user code may fail on fakes in any way; if it is at fault, the real run says so
            if any(parameter.is_meta for parameter in model.parameters()):
                raise ArgumentError(
                    f"{type(model).__name__} is on the meta device and cannot be traced there "
                    f"({type(error).__name__}: {error}); give the model on a real device"
                ) from error
            logger.info("the model is traced by a real run, it does not run on fake tensors: %s", error)
            counter, traced = _for_real(model, sample_batch, call_model, loss_func), False
        state = 2.0 if make_optimizer is None else optimizer_state_per_param(make_optimizer)
    return _profile(model, counter, batch_size(sample_batch), state, traced)


def _on_fakes(model: nn.Module, batch: Any, call_model: CallModel, loss_func: LossFunc | None) -> Counter:
    from torch._subclasses.fake_tensor import FakeTensorMode

    # Real tensors that the copy still holds, in lists or closures, become fakes where they are used.
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        with mode:
            made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
        return made.requires_grad_(tensor.requires_grad and tensor.is_leaf)

    duplicate = copy_structure(model, fake)
    batch = map_tensors(fake, batch)
    return _count(duplicate, batch, call_model, loss_func, mode)


def _for_real(model: nn.Module, batch: Any, call_model: CallModel, loss_func: LossFunc | None) -> Counter:
    device = next(model.parameters()).device
    batch = map_tensors(lambda tensor: tensor.to(device), batch)
    return _count(lazy_copy(model, device), batch, call_model, loss_func, None)


def _count(model: nn.Module, batch: Any, call_model: CallModel, loss_func: LossFunc | None, mode: Any) -> Counter:
    counter = Counter(model)
    with ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        if mode is not None:
            stack.enter_context(mode)
        stack.enter_context(counter.watching(repeated_blocks(model)))
        output = call_model(model, batch)
        if loss_func is not None:
            loss_func(batch, output)
    counter.output_bytes = sum(map(tensor_bytes, tensors_of(output)))
    return counter


def _profile(model: nn.Module, counter: Counter, samples: int, state: float, traced: bool) -> ModelProfile:
    parameters = list(model.parameters())
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    return ModelProfile(
        segments=_segments(model, counter),
        batch_size=samples,
        num_params=sum(parameter.numel() for parameter in parameters),
        num_trainable=sum(parameter.numel() for parameter in trainable),
        param_bytes=sum(map(tensor_bytes, parameters)),
        trainable_bytes=sum(map(tensor_bytes, trainable)),
        buffer_bytes=sum(map(tensor_bytes, model.buffers())),
        output_bytes=counter.output_bytes,
        optim_state_per_param=state,
        module_classes=frozenset(type(module).__name__ for module in model.modules()),
        traced=traced,
    )


def _segments(model: nn.Module, counter: Counter) -> tuple[Segment, ...]:
    """Runs of blocks that are alike, and all the rest as one segment."""
    segments: list[Segment] = []
    seen: set[int] = set()
    for name, block in repeated_blocks(model).items():
        segment = _segment(name, block, counter.blocks[name], seen)
        last = segments[-1] if segments else None
        if last is not None and replace(segment, name=last.name, count=last.count) == last:
            segments[-1] = replace(last, count=last.count + 1)
        else:
            segments.append(segment)
    return (_segment("", model, counter.rest, seen), *segments)


def _segment(name: str, module: nn.Module, count: Count, seen: set[int]) -> Segment:
    """What was counted in a module; parameters that an earlier segment has are not counted again."""
    parameters = [parameter for parameter in module.parameters() if id(parameter) not in seen]
    seen.update(map(id, parameters))
    return Segment(
        name=name,
        is_block=bool(name),
        num_params=float(sum(parameter.numel() for parameter in parameters)),
        num_trainable=float(sum(parameter.numel() for parameter in parameters if parameter.requires_grad)),
        matmuls=tuple(count.matmuls),
        attention_flops=count.attention_flops,
        outside=Region(saved_bytes=count.activation_bytes, traffic_bytes=count.traffic_bytes),
        input_bytes=count.input_bytes,
        working_bytes=2.0 * count.largest_bytes,  # that result's gradient, and its input's
        num_ops=count.num_ops,
    )


def optimizer_state_per_param(make_optimizer: MakeOptimizer) -> float:
    """Elements of state that the optimizer keeps for one element of a parameter: Adam 2, momentum 1, plain SGD 0.

    One step on a small matrix tells. Optimizers that cannot step alone (they need a closure, or particular
    groups) count as 2.
    """
    parameter = nn.Parameter(torch.zeros(64, 64))
    parameter.grad = torch.ones_like(parameter)
    try:
        optimizer = make_optimizer([parameter])
        optimizer.step()
    except Exception as error:  # a stranger's optimizer may refuse in any way, by an assertion above all
        logger.info("the optimizer's state is taken for two elements a parameter, it cannot step alone: %s", error)
        return 2.0
    return sum(tensor.numel() for tensor in tensors_of(optimizer.state) if tensor.dim() > 0) / parameter.numel()
