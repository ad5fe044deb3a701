"""Activation checkpointing: keep a block's inputs, and compute what lies between again in backward.

Memory falls to a block's inputs; backward pays one more forward (Chen et al., "Training Deep Nets with Sublinear Memory
Cost", 2016). `torch.utils.checkpoint` does the work. Here is what a block of a real model needs around it:

- tensors may be anywhere in positional and keyword arguments; forward sees the caller's own containers, a recompute
  sees them as they were before forward;
- buffers and attributes that forward changes (BatchNorm's statistics, codes that move) are changed once, and the
  recompute reads them as forward did; so it does random numbers, also those of numpy and Python (`forward_state`);
- random numbers are restored on the devices of the parameters too, not only on those of the arguments;
- context variables are those of forward, also where autograd goes backward in a thread of its own, as on CUDA;
- the checkpointed inputs, and nothing else, can wait in host memory; or the results that took the most work are kept
  as well (`selective`);
- the reentrant form takes what torch's does not: keyword arguments, nested outputs, inputs that need no gradient.

Not covered: state that forward changes in objects which are neither the module's nor its arguments.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
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
from atorch.runtime.memory.forward_state import COUNTER, ForwardState
from atorch.runtime.memory.selective_recompute import selective_contexts
from atorch.runtime.precision.amp import casting_anew

M = TypeVar("M", bound=nn.Module)
_Function = Callable[..., Any]
_Kwargs = dict[str, Any]

# Of the checkpointed forward that this thread runs: is it a recompute, and what does a call in it add to the counters.
_pass: ContextVar[tuple[bool, int]] = ContextVar("atorch_recompute_pass", default=(False, 0))


_disabled: ContextVar[bool] = ContextVar("atorch_checkpointing_disabled", default=False)


class _Options(NamedTuple):
    offload_to_cpu: bool = False
    maintain_forward_counter: bool = False
    reentrant: bool = False
    selective: bool = False
    preserve_rng_state: bool = True

    @property
    def needs_python(self) -> bool:
        """True if backward runs Python that a compiler cannot take along."""
        return self.offload_to_cpu or self.maintain_forward_counter or self.reentrant


@contextmanager
def disable_checkpointing() -> Iterator[None]:
    """Inside, checkpointed modules run their plain forward, and keep what it computes; compiled code does not ask."""
    token = _disabled.set(True)
    try:
        yield
    finally:
        _disabled.reset(token)


def is_recomputing() -> bool:
    """True if the running forward is a recompute in backward; each thread has its own answer."""
    return _pass.get()[0]


def checkpoint_wrapper(
    module: M,
    offload_to_cpu: bool = False,
    maintain_forward_counter: bool = False,
    *,
    reentrant: bool = False,
    selective: bool = False,
) -> M:
    """The same `module`, whose `forward` from now on keeps its inputs alone and runs again in backward.

    Its class, the names in its `state_dict` and the signature of `forward` stay; a deepcopy or a pickle of it
    checkpoints itself. Where gradients are disabled it is the plain forward.

    offload_to_cpu: inputs that were computed in this graph wait in host memory (pinned, for CUDA). Leaves (parameters,
        masks, positions) stay: others hold them anyway. This frees memory only if nothing else keeps the input, as a
        residual branch around the module would. Inside another checkpoint, the inner inputs are kept on the host too.
    maintain_forward_counter: `module` and each inner one get an integer `_checkpoint_fwd_counter`, which rises with
        their calls in forward and falls with their calls in the recompute: after one backward it is where it was.
    reentrant: use torch's reentrant form, for modules that save differently each time they run (`torch.jit.script`).
        It serves `loss.backward()` only, and gives no gradient to tensors in objects that are no pytrees.
    selective: keep the results of products with weights and of attention as well, and compute only the rest again.
        Backward runs once through such a forward, and what is kept must not be changed in place.

    Under `torch.compile` the plain form and the selective one become part of the graph. Each of the other three options
    needs Python in backward: such a module runs uncompiled, and `fullgraph=True` refuses it.

    Raises ArgumentError for what is no module with a forward; if it is wrapped already: its forward would be recomputed
    twice; or for `selective` beside `reentrant`, which recomputes everything, or beside `offload_to_cpu`, which would
    move the least part.
    """
    options = _Options(offload_to_cpu, maintain_forward_counter, reentrant, selective)
    _check_module(module)
    _check_switches("checkpoint_wrapper", **options._asdict())
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
    """The output of `functions` called one after the other on `input`, checkpointed in `segments` even runs of them.

    The last run is a plain one: backward starts there and would recompute it at once. `functions` is an
    `nn.Sequential`, or any callables of one argument. Raises ArgumentError for what is no sequence of these, and unless
    1 ≤ segments ≤ number of functions.
    """
    steps = _steps(functions)
    _check_switches("checkpoint_sequential", offload_to_cpu=offload_to_cpu, reentrant=reentrant)
    if not isinstance(segments, int) or isinstance(segments, bool):
        raise ArgumentError(
            f"checkpoint_sequential was given {shown(segments)} as segments; it is a whole number, as in "
            f"checkpoint_sequential(model, {len(steps)}, input)"
        )
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
    """`function(*args, **kwargs)`, of which the inputs alone are kept. The `owners` are the modules that it calls.

    options: `offload_to_cpu`, as for `checkpoint_wrapper`; and `preserve_rng_state`, without which dropout draws anew.
    """
    return _run(_Options(**options), function, owners, args, kwargs)


def _check_module(module: object) -> None:
    if isinstance(module, type) and issubclass(module, nn.Module):
        raise ArgumentError(
            f"checkpoint_wrapper was given the class {module.__name__}; give an instance, or each: for module in "
            f"model.modules(): if isinstance(module, {module.__name__}): checkpoint_wrapper(module)"
        )
    if not isinstance(module, nn.Module):
        each = "; call it for each of them" if isinstance(module, (list, tuple, dict)) else ""
        raise ArgumentError(f"checkpoint_wrapper was given {shown(module)}; it takes a torch.nn.Module{each}")
    if "forward" not in vars(module) and type(module).forward is nn.Module.forward:
        raise ArgumentError(
            f"checkpoint_wrapper was given a {type(module).__name__}, which has no forward that could run again; call "
            "it for each of the modules inside: for block in blocks: checkpoint_wrapper(block)"
        )


def _check_switches(door: str, **switches: object) -> None:
    for name, given in switches.items():
        if not isinstance(given, int):  # True, False, 1 and 0
            raise ArgumentError(f"{door} was given {shown(given)} as {name}; it is True or False")


def _steps(functions: object) -> list[_Function]:
    """The callables of a sequence; raises ArgumentError for what is none."""
    if not isinstance(functions, Iterable) or isinstance(functions, (Tensor, Mapping, nn.ModuleDict, str)):
        what = f"the module {type(functions).__name__}" if isinstance(functions, nn.Module) else shown(functions)
        raise ArgumentError(
            f"checkpoint_sequential was given {what}, which is no sequence; give an nn.Sequential or a list of "
            "callables of one argument. checkpoint_wrapper(module) checkpoints any one module"
        )
    steps = list(functions)
    for step in steps:
        if not callable(step) or isinstance(step, type):
            raise ArgumentError(
                f"checkpoint_sequential was given {shown(step)} in its sequence; each is called with the output of "
                "the one before: give modules, or functions of one argument"
            )
    return steps


def chained(functions: Iterable[Callable[..., Any]], value: Any) -> Any:
    """The value after all functions, one after another."""
    for function in functions:
        value = function(value)
    return value


class _CheckpointedForward:
    """The checkpointed `module.forward`. It refers to its module weakly, since the module refers to it."""

    def __init__(self, module: nn.Module, forward: _Function | None, options: _Options) -> None:
        self.module, self.options, self.run = weakref.ref(module), options, _runner(options)
        self.forward = forward  # the instance's own, if somebody had put one there

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self.plain(), [self.module()], args, kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        # copy and pickle make the new module before its attributes, so that this argument becomes the new module.
        return _CheckpointedForward, (self.module(), self.forward, self.options)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.plain())

    def plain(self) -> _Function:
        # The class is looked up at each call: `fully_shard` and parametrizations give a module another one.
        module = self.module()
        if module is None:
            raise ReferenceError("The module of this checkpointed forward is gone. Keep the module, not its forward.")
        return self.forward or functools.partial(type(module).forward, module)


def _runner(options: _Options) -> _Function:
    run = functools.partial(_run, options)
    if not options.needs_python:
        return run
    disable: Callable[..., _Function] = torch.compiler.disable
    return disable(run, reason="offload, counters and reentrant checkpointing need Python in backward")


def _run(options: _Options, forward: _Function, owners: list[nn.Module], args: tuple[Any, ...], kwargs: _Kwargs) -> Any:
    """`forward(*args, **kwargs)`, checkpointed where gradients are recorded. The `owners` hold its tensors."""
    # Compiled code cannot ask whether checkpointing is disabled; it checkpoints whatever the context it runs in.
    # Nor can what torch.func transforms be recomputed.
    is_disabled = not torch.compiler.is_compiling() and (
        _disabled.get() or torch._C._functorch.peek_interpreter_stack() is not None
    )
    if is_disabled or not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    if torch.compiler.is_compiling():
        # The compiler itself keeps buffers, random numbers and autocast right: it runs forward once.
        again = functools.partial(forward, **kwargs)
        if options.selective:
            return checkpoint(again, *args, use_reentrant=False, context_fn=selective_contexts)
        return checkpoint(again, *args, use_reentrant=False, preserve_rng_state=options.preserve_rng_state)
    leaves, spec = tree_flatten((args, kwargs))
    # An object given twice is kept once, and stays one in the recompute: attention asks whether `query is key`.
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
        # An early stop would skip the last inner modules, and leave their counters up.
        early_stop = not any(COUNTER in vars(owner) for owner in owners)
        keeps_rng = options.preserve_rng_state
        return checkpoint(call, *inputs, use_reentrant=False, early_stop=early_stop, preserve_rng_state=keeps_rng)


def _run_reentrant(call: _Call, inputs: list[Any]) -> Any:
    """Torch's reentrant form takes and gives flat tuples, and reaches backward only through inputs with gradient."""
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
    """One checkpointed call of a forward. Its first run is the forward pass; every later one is a recompute."""

    forward: _Function
    owners: list[nn.Module]
    modules: list[nn.Module]  # the owners and all inside them
    spec: TreeSpec
    places: list[int]  # where each leaf of the arguments is found among the inputs
    given: tuple[tuple[Any, ...], _Kwargs] | None
    draws: bool  # whether a recompute draws the same random numbers
    state: ForwardState | None = None  # before forward
    keeping: AbstractContextManager[Any] = field(default_factory=nullcontext)  # around the forward pass
    handing_out: AbstractContextManager[Any] = field(default_factory=nullcontext)  # around a recompute
    context: Context = field(default_factory=copy_context)  # of the forward pass

    def __call__(self, *inputs: Any) -> Any:
        if self.given is None:
            args, kwargs = tree_unflatten([inputs[place] for place in self.places], self.spec)
            assert self.state is not None
            with self.state.as_before(), self.handing_out:
                return self.context.copy().run(self.run, args, kwargs, recomputing=True, count=-1)
        (args, kwargs), self.given = self.given, None  # from here on autograd alone keeps the inputs
        self.state = ForwardState(self.modules, inputs, self.draws)
        # In the recompute of an outer checkpoint a forward does not count: its own recompute counts down.
        again = is_recomputing()
        try:
            with self.keeping:
                return self.run(args, kwargs, recomputing=again, count=0 if again else 1)
        finally:  # also where the recompute of an outer checkpoint stops early, in here
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
    """An empty tensor on each device that has parameters and no input: torch restores random numbers by input."""
    devices = {p.device for module in modules for p in module._parameters.values() if p is not None}
    devices -= {tensor.device for tensor in inputs if isinstance(tensor, Tensor)}
    return [torch.empty(0, device=device) for device in devices if device.type not in ("cpu", "meta")]


def _count(module: nn.Module, args: Any = ()) -> None:
    vars(module)[COUNTER] += _pass.get()[1]


def _to_host(tensor: Tensor) -> tuple[Tensor, torch.device, int]:
    # `non_blocking` pins, for CUDA; the order of the stream puts this copy before any later write to `tensor`.
    # Detached, since an operation that saves its own output would hold itself for ever where that is on the CPU.
    kept = tensor if tensor.is_leaf else tensor.detach().to("cpu", non_blocking=True)
    return kept, tensor.device, kept._version


def _from_host(packed: tuple[Tensor, torch.device, int]) -> Tensor:
    kept, device, version = packed
    if kept._version != version:
        raise RuntimeError("An input was changed in place after the checkpointed forward that needs it. Change a copy.")
    return kept.to(device, non_blocking=True)
