"""Activation checkpointing: keep a block's inputs, and recompute its activations in backward.

Memory falls to a block's inputs, and backward takes one more forward (Chen et al., "Training Deep Nets with Sublinear
Memory Cost", 2016). This module wraps `torch.utils.checkpoint`, and adds support for blocks of real models:

- tensors may be anywhere in positional and keyword arguments; forward gets the caller's own containers, a recompute
  gets them as they were before forward;
- buffers and attributes that forward changes (BatchNorm's statistics, EMA codes) change once, and the recompute reads
  the values that forward read; the same holds for random numbers, also of numpy and Python (`forward_state`);
- random states are restored on the devices of the parameters, too, not only on those of the arguments;
- context variables are those of forward, even if autograd runs backward in a separate thread, as on CUDA;
- only the checkpointed inputs can be moved to host memory; or the results with the most work are kept, too
  (`selective`);
- the reentrant form takes keyword arguments, nested outputs and inputs without gradient, unlike torch's.

State that forward changes in objects other than the module or its arguments is not covered.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass, field, is_dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from atorch.errors import ArgumentError, shown
from atorch.logs import logger
from atorch.runtime.memory.forward_state import COUNTER, ForwardState, selective_contexts
from atorch.runtime.precision.amp import casting_anew

M = TypeVar("M", bound=nn.Module)
_Function = Callable[..., Any]
_Kwargs = dict[str, Any]

# (whether this thread's checkpointed forward is a recompute, the increment of forward counters per call).
_pass: ContextVar[tuple[bool, int]] = ContextVar("atorch_recompute_pass", default=(False, 0))
_disabled: ContextVar[bool] = ContextVar("atorch_checkpointing_disabled", default=False)


class _Options(NamedTuple):
    offload_to_cpu: bool = False
    maintain_forward_counter: bool = False
    reentrant: bool = False
    selective: bool = False
    preserve_rng_state: bool = True


@contextmanager
def disable_checkpointing() -> Iterator[None]:
    """Inside, checkpointed modules run their plain forward, and keep all activations. Compiled code ignores this."""
    token = _disabled.set(True)
    try:
        yield
    finally:
        _disabled.reset(token)


def is_recomputing() -> bool:
    """True if the running forward of this thread is a recompute in backward."""
    return _pass.get()[0]


def checkpoint_wrapper(
    module: M,
    offload_to_cpu: bool = False,
    maintain_forward_counter: bool = False,
    *,
    reentrant: bool = False,
    selective: bool = False,
) -> M:
    """Let the `forward` of `module`, in place, keep only its inputs and run again in backward; returns the module.

    The module's class, the names in its `state_dict` and the signature of `forward` stay. Copies and pickles of it are
    checkpointed, too. With gradients disabled, the plain forward runs.

    offload_to_cpu: keep inputs that were computed in this graph in host memory (pinned, for CUDA). Leaves (parameters,
        masks, positions) stay, as they have other owners. This frees memory only if nothing else keeps the input, such
        as a residual branch around the module. Inside another checkpoint, inner inputs are on the host, too.
    maintain_forward_counter: `module` and its inner modules get an integer `_checkpoint_fwd_counter`, which rises with
        calls in forward and falls with calls in the recompute. After one backward it is back at its old value.
    reentrant: use torch's reentrant form, for modules that save differently at each run (`torch.jit.script`). It
        supports only `loss.backward()`, and gives no gradient to tensors in objects that are not pytrees.
    selective: also keep the results of matmuls with weights and of attention, and recompute only the rest. Backward
        can run once through such a forward, and kept results must not be changed in place.

    Under `torch.compile` the plain and the selective form become part of the graph. The other three options need
    Python in backward. A module with these runs uncompiled, and `fullgraph=True` refuses it.

    Raises ArgumentError for anything but a module with a forward, and for a wrapped module, whose forward would be
    recomputed twice. It also refuses `selective` with `reentrant`, which recomputes everything, or with
    `offload_to_cpu`, which would move the smallest part.
    """
    options = _Options(offload_to_cpu, maintain_forward_counter, reentrant, selective)
    _check_module(module)
    forward = vars(module).get("forward")
    if isinstance(forward, _CheckpointedForward):
        raise ArgumentError(
            f"checkpoint_wrapper was given a {type(module).__name__} that it has wrapped already. "
            "A module is wrapped once, with all its options; leave out the second call."
        )
    if selective and (reentrant or offload_to_cpu):
        other = "reentrant" if reentrant else "offload_to_cpu"
        raise ArgumentError(
            f"checkpoint_wrapper was given selective and {other}, which do not go together: selective keeps results on "
            "the device, from a forward that is not reentrant. Leave one of them out."
        )
    if maintain_forward_counter:
        for inner in module.modules():
            vars(inner).setdefault(COUNTER, 0)
            if inner is not module and _count not in inner._forward_pre_hooks.values():
                inner.register_forward_pre_hook(_count)
    module.forward = _CheckpointedForward(module, forward, options)
    return module


def checkpoint_sequential(
    functions: Iterable[_Function], segments: int, input: Any, *, offload_to_cpu: bool = False, reentrant: bool = False
) -> Any:
    """The output of `functions`, called in sequence on `input`, and checkpointed in `segments` equal segments.

    The last segment is not checkpointed, since backward starts there and would recompute it at once. `functions` is an
    `nn.Sequential`, or any callables of one argument. `offload_to_cpu` and `reentrant` are those of
    `checkpoint_wrapper`. Raises ArgumentError unless 1 ≤ segments ≤ number of functions.
    """
    steps = list(functions)
    if not 1 <= segments <= len(steps):
        raise ArgumentError(
            f"checkpoint_sequential was asked for {segments} segments of {len(steps)} functions. "
            f"A segment holds at least one; ask for 1 to {len(steps)}."
        )
    run = _runner(_Options(offload_to_cpu, reentrant=reentrant))
    bounds = [len(steps) * segment // segments for segment in range(segments + 1)]
    for start, stop in zip(bounds[:-2], bounds[1:-1], strict=True):
        owners = [step for step in steps[start:stop] if isinstance(step, nn.Module)]
        input = run(functools.partial(chained, steps[start:stop]), owners, (input,), {})
    return chained(steps[bounds[-2] :], input)


def recomputed(function: _Function, owners: list[nn.Module], args: Any, kwargs: _Kwargs, **options: bool) -> Any:
    """`function(*args, **kwargs)`, checkpointed. The `owners` are the modules that it calls.

    options: `offload_to_cpu`, as for `checkpoint_wrapper`; and `preserve_rng_state`: False lets dropout draw anew.
    """
    return _run(_Options(**options), function, owners, args, kwargs)


def _check_module(module: object) -> None:
    if isinstance(module, type) and issubclass(module, nn.Module):
        raise ArgumentError(
            f"checkpoint_wrapper was given the class {module.__name__}; give an instance, or each: for module in "
            f"model.modules(): if isinstance(module, {module.__name__}): checkpoint_wrapper(module)"
        )
    if not isinstance(module, nn.Module):
        hint = "; call it for each of them" if isinstance(module, (list, tuple, dict)) else ""
        raise ArgumentError(f"checkpoint_wrapper was given {shown(module)}; it takes a torch.nn.Module{hint}")
    if "forward" not in vars(module) and type(module).forward is nn.Module.forward:
        raise ArgumentError(
            f"checkpoint_wrapper was given a {type(module).__name__}, which has no forward that could run again; call "
            "it for each of the modules inside: for block in blocks: checkpoint_wrapper(block)"
        )


def chained(functions: Iterable[Callable[..., Any]], value: Any) -> Any:
    """The result of all functions, called in sequence on `value`."""
    for function in functions:
        value = function(value)
    return value


class _CheckpointedForward:
    """The checkpointed `module.forward`, with a weak reference to the module, which refers to it."""

    def __init__(self, module: nn.Module, forward: _Function | None, options: _Options) -> None:
        self.module, self.options, self.run = weakref.ref(module), options, _runner(options)
        self.forward = forward  # a forward that was set on the instance, if any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self.plain(), [self.module()], args, kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        # copy and pickle create the new module before its attributes, so this argument becomes the new module.
        return _CheckpointedForward, (self.module(), self.forward, self.options)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.plain())

    def plain(self) -> _Function:
        # Look up the class at each call, since `fully_shard` and parametrizations change it.
        module = self.module()
        if module is None:
            raise ReferenceError("The module of this checkpointed forward is gone. Keep the module, not its forward.")
        return self.forward or functools.partial(type(module).forward, module)


def _runner(options: _Options) -> _Function:
    run = functools.partial(_run, options)
    if not (options.offload_to_cpu or options.maintain_forward_counter or options.reentrant):
        return run
    disable: Callable[..., _Function] = torch.compiler.disable
    return disable(run, reason="offload, counters and reentrant checkpointing need Python in backward")


def _run(options: _Options, forward: _Function, owners: list[nn.Module], args: tuple[Any, ...], kwargs: _Kwargs) -> Any:
    """`forward(*args, **kwargs)`, checkpointed if gradients are recorded. The `owners` hold its tensors."""
    # Compiled code cannot read `_disabled`, and always checkpoints. A forward under torch.func cannot be recomputed.
    is_disabled = not torch.compiler.is_compiling() and (
        _disabled.get() or torch._C._functorch.peek_interpreter_stack() is not None
    )
    if is_disabled or not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    if torch.compiler.is_compiling():
        # The compiler itself handles buffers, random numbers and autocast, as it runs forward once.
        again = functools.partial(forward, **kwargs)
        if options.selective:
            return checkpoint(again, *args, use_reentrant=False, context_fn=selective_contexts)
        return checkpoint(again, *args, use_reentrant=False, preserve_rng_state=options.preserve_rng_state)
    leaves, spec = tree_flatten((args, kwargs))
    # An object passed twice is kept once, and is one object in the recompute: attention tests `query is key`.
    inputs = list({id(leaf): leaf for leaf in leaves}.values())
    places = {id(leaf): place for place, leaf in enumerate(inputs)}
    modules = [module for owner in owners for module in owner.modules()]
    order = [places[id(leaf)] for leaf in leaves]
    call = _Call(forward, owners, modules, spec, order, (args, kwargs), options.preserve_rng_state)
    if options.selective:
        call.keeping, call.handing_out = selective_contexts()
    inputs += _on_other_devices(modules, inputs)
    outside = saved_tensors_hooks(_to_host, _from_host) if options.offload_to_cpu else nullcontext()
    with outside, casting_anew() if options.selective else nullcontext():
        if options.reentrant:
            return _run_reentrant(call, inputs)
        # An early stop would skip the last inner modules, and leave their counters raised.
        early_stop = not any(COUNTER in vars(owner) for owner in owners)
        keeps_rng = options.preserve_rng_state
        return checkpoint(call, *inputs, use_reentrant=False, early_stop=early_stop, preserve_rng_state=keeps_rng)


def _run_reentrant(call: _Call, inputs: list[Any]) -> Any:
    """Run torch's reentrant form, which needs flat tuples of inputs and outputs, and an input with gradient."""
    parameters = [parameter for module in call.modules for parameter in module._parameters.values()]
    if not any(tensor.requires_grad for tensor in parameters + inputs if isinstance(tensor, Tensor)):
        return call(*inputs)
    specs: list[TreeSpec] = []

    def flat(*inputs: Any) -> tuple[Any, ...]:
        leaves, spec = tree_flatten(call(*inputs))
        for leaf in leaves:
            if is_dataclass(leaf) and any(isinstance(value, Tensor) for value in vars(leaf).values()):
                raise ArgumentError(
                    f"A module under reentrant checkpointing returned a {type(leaf).__name__}, whose tensors would get "
                    "no gradient. Return a tuple or a dict, or use the non-reentrant form."
                )
        specs.append(spec)
        return tuple(leaves)

    outputs = checkpoint(flat, *inputs, torch.empty(0, requires_grad=True), use_reentrant=True)
    return tree_unflatten(outputs, specs[0])


@dataclass(eq=False)
class _Call:
    """One checkpointed call of a forward. Its first run is the forward pass, and later runs are recomputes."""

    forward: _Function
    owners: list[nn.Module]
    modules: list[nn.Module]  # the owners and all modules inside them
    spec: TreeSpec
    places: list[int]  # index in the inputs of each leaf of the arguments
    arguments: tuple[tuple[Any, ...], _Kwargs] | None
    draws: bool  # True: a recompute draws the same random numbers
    state: ForwardState | None = None  # before forward
    keeping: AbstractContextManager[Any] = field(default_factory=nullcontext)  # around the forward pass
    handing_out: AbstractContextManager[Any] = field(default_factory=nullcontext)  # around a recompute
    context: Context = field(default_factory=copy_context)  # of the forward pass

    def __call__(self, *inputs: Any) -> Any:
        if self.arguments is None:
            args, kwargs = tree_unflatten([inputs[place] for place in self.places], self.spec)
            assert self.state is not None
            with self.state.as_before(), self.handing_out:
                return self.context.copy().run(self.run, args, kwargs, recomputing=True, count=-1)
        (args, kwargs), self.arguments = self.arguments, None  # from here on only autograd keeps the inputs
        self.state = ForwardState(self.modules, inputs, self.draws)
        # In the recompute of an outer checkpoint a forward does not count, since its own recompute counts down.
        again = is_recomputing()
        try:
            with self.keeping:
                return self.run(args, kwargs, recomputing=again, count=0 if again else 1)
        finally:  # also if the recompute of an outer checkpoint stops early, in here
            self.state.settle()

    def run(self, args: tuple[Any, ...], kwargs: _Kwargs, recomputing: bool, count: int) -> Any:
        token = _pass.set((recomputing, count))
        try:
            for owner in self.owners:
                if COUNTER in vars(owner) and _count not in owner._forward_pre_hooks.values():
                    _count(owner)
            return self.forward(*args, **kwargs)
        finally:
            _pass.reset(token)


def _on_other_devices(modules: list[nn.Module], inputs: list[Any]) -> list[Tensor]:
    """An empty tensor on each device with parameters but no input; torch restores random states by input device."""
    devices = {p.device for module in modules for p in module._parameters.values() if p is not None}
    devices -= {tensor.device for tensor in inputs if isinstance(tensor, Tensor)}
    return [torch.empty(0, device=device) for device in devices if device.type not in ("cpu", "meta")]


def _count(module: nn.Module, args: Any = ()) -> None:
    vars(module)[COUNTER] += _pass.get()[1]


def _to_host(tensor: Tensor) -> tuple[Tensor, torch.device, int]:
    # `non_blocking` pins, for CUDA; the stream orders this copy before any later write to `tensor`.
    # Detached, since an operation that saves its own output on the CPU would be in a cycle with it.
    kept = tensor if tensor.is_leaf else tensor.detach().to("cpu", non_blocking=True)
    return kept, tensor.device, kept._version


def _from_host(packed: tuple[Tensor, torch.device, int]) -> Tensor:
    kept, device, version = packed
    if kept._version != version:
        raise RuntimeError("An input was changed in place after the checkpointed forward that needs it. Change a copy.")
    return kept.to(device, non_blocking=True)


def turn_off_caches(model: nn.Module) -> None:
    """Stop forward from filling a key/value cache (`config.use_cache` of transformers' models).

    A recompute would append to it a second time, and a pipeline stage has only its own blocks' part of it.
    Generation has a separate setting, which stays.
    """
    configs = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
    for config in configs.values():
        if getattr(config, "use_cache", None):
            config.use_cache = False
            logger.info("%s.use_cache is turned off", type(config).__name__)
