"""Data parallelism: every rank holds the full module, and gradients are averaged during backward.

Uses torch's DistributedDataParallel, but keeps the user's names, state dicts and attributes.
Memory: as on one device, since gradients are views of the reduction buckets. Communication per step: an all-reduce
of the gradients, bucket by bucket, overlapped with the rest of backward.

torch averages only the gradients of the first backward pass after each forward pass. It misses parameters that were
frozen at construction, a second pass with `retain_graph`, and passes from another output or an earlier forward pass.
It also misses passes from methods or submodules that were called directly. This module averages those in extra calls
when such a pass ends. Gradients that the user assigned are averaged before the optimizer steps. So are all gradients
if `torch.autograd.grad` took some: averaging twice does not change them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _find_tensors
from torch.optim import Optimizer

from atorch.errors import StrategyError
from atorch.logs import logger
from atorch.model.changes import AddedParameters, ConvertedParameters
from atorch.model.pytree import dense_parts, is_dense
from atorch.model.wrapper import Wrapper
from atorch.runtime.data_parallel.buckets import average, broadcast
from atorch.runtime.gradients.backward import Postponed, expects_none, is_captured, postpone, postponed, weakly
from atorch.runtime.optimizer.wrapped_optimizer import before_steps


class Replicated(Wrapper):
    """DistributedDataParallel with the user's names: parameter names have no `module.`, attributes are reachable.

    Wraps one instead of being one: torch.distributed.checkpoint detects it by type, and requires names with `module.`.

    The user's methods and submodules that are reached through it run on this rank only, as `generate` should. A
    backward pass through them averages gradients, too.
    """

    def __init__(self, replicas: DistributedDataParallel) -> None:
        super().__init__()
        self._replicas = (replicas,)  # in a tuple, or its parameters would be registered a second time
        self._averaging, self._additions = _Averaging(replicas), AddedParameters(replicas.module)
        self.module: nn.Module = replicas.module

    @property
    def replicas(self) -> DistributedDataParallel:
        """The DistributedDataParallel, for its communication hooks and the like."""
        return self._replicas[0]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output; backward through it averages gradients, also of modules that were replaced."""
        if additions := self._additions.find():
            self.take_parameters(parameter for _, parameter in additions)
        self._averaging.begin_forward()
        if torch._C._functorch.peek_interpreter_stack() is not None:  # torch.func returns gradients to its caller
            return self.module(*args, **kwargs)
        output = self.replicas(*args, **kwargs)
        if torch.is_grad_enabled() and self.replicas.require_backward_grad_sync:
            self._averaging.expect(output)
        return output

    def prepare_for_backward(self) -> None:
        """Average in the next backward pass, also after a forward pass in `no_sync`; as torch's pipelines do."""
        self.replicas.reducer.prepare_for_backward([])
        self._averaging.expect()

    def no_sync(self) -> AbstractContextManager[None]:
        """Make backward passes inside accumulate gradients without averaging them."""
        return self.replicas.no_sync()

    def take_parameters(self, parameters: Iterable[torch.Tensor]) -> None:
        """Average also the gradients of parameters that were added since the module was wrapped."""
        self._averaging.take(parameters)


class _Averaging:
    """Averages all gradients of backward passes: by DistributedDataParallel, or else when a pass ends."""

    def __init__(self, replicas: DistributedDataParallel) -> None:
        self._replicas = replicas
        self._is_told = replicas.find_unused_parameters or replicas.static_graph  # torch handles unused parameters
        self._expects = self._completes = False  # torch reduces the next pass; it is getting zeros for unused ones
        self._arrived: dict[torch.Tensor, bool] = {}  # in the pass that torch reduces; True with a gradient
        self._missed: set[torch.Tensor] = set()  # have gradients that torch does not reduce
        self._has_run = self._was_taken = False  # since the last step: a pass; a call of `torch.autograd.grad`
        self._is_none = False  # the gradient that has arrived last
        self._task = -1  # the last pass checked for `torch.autograd.grad`
        self._tasks: set[int] = set()  # running passes, with nested ones: reentrant checkpoints run their own
        self._postponed: dict[tuple[Postponed, torch.Tensor], torch.Tensor | None] = {}  # to the gradient before
        self._has_warned_of_hooks = False
        self._hooked: list[torch.Tensor] = []
        self._known: list[torch.Tensor] = [param for param in replicas.module.parameters() if param.requires_grad]
        self._frozen: list[torch.Tensor] = [param for param in replicas.module.parameters() if not param.requires_grad]
        self._unfrozen: list[torch.Tensor] = []
        self._conversions = ConvertedParameters(self._known)
        self._hook(self._known)

    def expect(self, output: Any = None) -> None:
        """Expect torch to reduce the next backward pass, which may begin at `output`."""
        self._expects = True
        self._arrived.clear()
        self._tasks.clear()  # a pass that raised never called `_end`
        for tensor in _find_tensors(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(weakly(self._begin))

    def begin_forward(self) -> None:
        """Watch parameters unfrozen since the last forward; forget a backward pass whose gradients were cleared."""
        if not torch.is_grad_enabled():
            return
        postpone(self._hooked, weakly(self._postpone))
        self._conversions.refuse()
        if self._has_run:
            self._has_run = any(parameter.grad is not None for parameter in (*self._known, *self._unfrozen))
        unfrozen = [parameter for parameter in self._frozen if parameter.requires_grad]
        if unfrozen:
            self._frozen = [parameter for parameter in self._frozen if not parameter.requires_grad]
            self._watch(unfrozen)

    def take(self, parameters: Iterable[torch.Tensor]) -> None:
        """Watch parameters that were added to the module, and broadcast their values."""
        old = set(map(id, (*self._known, *self._frozen, *self._unfrozen)))
        new = [parameter for parameter in parameters if id(parameter) not in old]
        broadcast([(0, new)], self._replicas.process_group)
        self._frozen += [parameter for parameter in new if not parameter.requires_grad]
        self._watch([parameter for parameter in new if parameter.requires_grad])

    def _watch(self, parameters: Sequence[torch.Tensor]) -> None:
        self._unfrozen += parameters
        self._hook(parameters)

    def _hook(self, parameters: Iterable[torch.Tensor]) -> None:
        for parameter in parameters:
            is_known = len(self._hooked) < len(self._known)
            parameter.register_hook(expects_none(partial(weakly(self._arrives), len(self._hooked))))
            self._hooked.append(parameter)
            parameter.register_post_accumulate_grad_hook(expects_none(partial(weakly(self._accumulated), is_known)))

    def _arrives(self, number: int, gradient: torch.Tensor | None) -> None:
        """Record if the gradient is None, and, once a pass, if `torch.autograd.grad` captures gradients."""
        self._is_none = gradient is None
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task = task
            self._was_taken |= is_captured(get_gradient_edge(self._hooked[number]).node)

    def _accumulated(self, is_known: bool, parameter: torch.Tensor) -> None:
        if self._completes:
            return
        if not self._is_none:
            self._has_run = True
        if is_known and self._expects:
            self._begin()
            self._refuse_second(parameter)
            self._arrived[parameter] = parameter.grad is not None
        elif not self._is_none:
            self._begin()
            self._missed.add(parameter)

    def _refuse_second(self, parameter: torch.Tensor) -> None:
        """Raise if torch would count a second gradient of one pass, or would miss a reentrant checkpoint's."""
        if self._replicas.find_unused_parameters and len(self._tasks) > 1:
            raise StrategyError(
                "find_unused_parameters=True does not see what a reentrant checkpoint uses, which runs a backward pass "
                "of its own. Checkpoint with use_reentrant=False, or leave find_unused_parameters out"
            )
        if parameter in self._arrived and not self._is_told:
            name = next(name for name, other in self._replicas.module.named_parameters() if other is parameter)
            raise StrategyError(
                f"{name} is used in two reentrant checkpoints, and gets a gradient from each: "
                "checkpoint with use_reentrant=False, or give ddp static_graph=True"
            )

    def _begin(self, *_: Any) -> None:
        """Queue `_end` for the end of the running pass, after torch's own callbacks (hence queued twice)."""
        task = torch._C._current_graph_task_id()
        if task not in self._tasks:
            self._tasks.add(task)
            queue: Any = torch.autograd.Variable._execution_engine
            queue.queue_callback(lambda: queue.queue_callback(partial(self._end, task)))

    def _end(self, task: int) -> None:
        self._tasks.discard(task)
        is_inside = torch._C._current_autograd_node() is not None  # an outer pass goes on
        is_reduced = self._expects and bool(self._arrived)
        if is_reduced:
            if is_inside and (self._is_told or len(self._arrived) < len(self._known)):
                return
            self._complete()
        if not self._replicas.require_backward_grad_sync:
            return
        if self._unfrozen if is_reduced else self._missed:
            # Gradients that were averaged before are equal on all ranks, so averaging does not change them.
            candidates = self._unfrozen if is_reduced else [*self._known, *self._unfrozen]
            average_gradients(candidates, self._replicas.process_group, self._missed)
            self._missed.clear()
        self._run_hooks()

    def _postpone(self, hook: Postponed, parameter: torch.Tensor) -> None:
        if self._completes or (hook, parameter) in self._postponed:
            return
        if not self._replicas.require_backward_grad_sync and not self._has_warned_of_hooks:
            self._has_warned_of_hooks = True
            logger.warning(
                "hooks on gradients run once for all passes within no_sync and the one after them, on what these give "
                "together: only then is it averaged"
            )
        before = parameter.grad if hook.takes_gradient else None
        self._postponed[hook, parameter] = None if before is None else before.clone()

    @torch.no_grad()
    def _run_hooks(self) -> None:
        """Call users' hooks on averages, including those to which only another rank's pass contributed."""
        hooks, self._postponed = self._postponed, {}
        for hook, parameter in sorted(hooks, key=lambda pair: not pair[0].takes_gradient):
            before, gradient = hooks[hook, parameter], parameter.grad
            if gradient is None:
                continue
            if not hook.takes_gradient:
                hook.hook(parameter)
            elif before is None:
                gradient.copy_(hook.changed(gradient))
            else:
                gradient.copy_(before + hook.changed(gradient - before))

    def _complete(self) -> None:
        """Finish torch's reduction if the pass left parameters out; those that no rank used get no gradient."""
        self._expects = False
        self._missed.difference_update(self._known)
        if self._is_told:
            self._replicas._check_reducer_finalized()
            return
        used = [self._arrived.get(parameter, parameter.grad is not None) for parameter in self._known]
        lacking = [parameter for parameter in self._known if parameter not in self._arrived]
        elsewhere = [(hook, unused) for unused in lacking if unused.grad is None for hook in postponed(unused)]
        if lacking:
            self._give_zeros(lacking)
        group = self._replicas.process_group
        if dist.get_backend(group) == "fake":
            return
        flags = torch.tensor(used, dtype=torch.uint8, device=self._known[0].device)
        # A rank that used all parameters need not wait for the result.
        work = dist.all_reduce(flags, dist.ReduceOp.MAX, group=group, async_op=flags.device.type == "cpu")
        if not all(used):
            if work is not None:
                work.wait()
            for parameter, anywhere in zip(self._known, flags.tolist(), strict=True):
                if not anywhere:
                    parameter.grad = None
        self._postponed.update(dict.fromkeys(elsewhere))

    def _give_zeros(self, parameters: Sequence[torch.Tensor]) -> None:
        """Add zeros to the gradients that torch's reduction waits for."""
        frozen = [parameter for parameter in parameters if not parameter.requires_grad]
        self._completes = True
        try:
            for parameter in frozen:
                parameter.requires_grad_(True)
            torch.autograd.backward(list(parameters), [torch.zeros_like(parameter) for parameter in parameters])
        finally:
            self._completes = False
            for parameter in frozen:
                parameter.requires_grad_(False)

    def before_step(self, _: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Average gradients that no backward pass made; those of a backward pass may have been edited by users."""
        self._average_by_hand()
        inputs: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        name, closure = next(((k, v) for k, v in inputs.items() if k in (1, "closure") and callable(v)), (None, None))
        if closure is None:
            return None

        def averaged() -> Any:
            loss = closure()
            self._average_by_hand()
            return loss

        inputs[name] = averaged
        return tuple(inputs[index] for index in range(len(args))), {key: inputs[key] for key in kwargs}

    def _average_by_hand(self) -> None:
        by_hand, self._has_run, self._was_taken = not self._has_run or self._was_taken, False, False
        if by_hand and any(parameter.grad is not None for parameter in self._replicas.module.parameters()):
            average_gradients(list(self._replicas.module.parameters()), self._replicas.process_group)


def average_before_steps(optimizer: Optimizer | None, models: Iterable[nn.Module]) -> None:
    """Average gradients that users assigned, such as from `torch.autograd.grad`, before each step of `optimizer`.

    models: results of `replicate`.
    """
    for model in models:
        if isinstance(model, Replicated):
            before_steps(optimizer, weakly(model._averaging.before_step))


def average_gradients(
    parameters: Sequence[torch.Tensor], group: dist.ProcessGroup, changed: Collection[torch.Tensor] | None = None
) -> None:
    """Average `.grad` over the ranks of a group, where any rank has one; a missing one counts as zero.

    changed: the parameters whose gradients this rank changed; skips those that no rank changed.
    """
    has = torch.tensor(
        [parameter.grad is not None and (changed is None or parameter in changed) for parameter in parameters],
        dtype=torch.uint8,
        device=parameters[0].device,
    )
    dist.all_reduce(has, dist.ReduceOp.MAX, group=group)
    having = [parameter for parameter, anywhere in zip(parameters, has.tolist(), strict=True) if anywhere]
    for parameter in having:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    average([parameter.grad for parameter in having if parameter.grad is not None], group)


def replicas_of(model: nn.Module) -> DistributedDataParallel | None:
    """The DistributedDataParallel that averages the gradients of `model`; None where there is none."""
    if isinstance(model, Replicated):
        return model.replicas
    return model if isinstance(model, DistributedDataParallel) else None


def replicate(
    module: nn.Module,
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    find_unused_parameters: bool = False,
    static_graph: bool = False,
    bucket_cap_mb: int = 25,
) -> nn.Module:
    """Move `module` to `device`, broadcast rank 0's values over `group`, and average gradients over it.

    All ranks of the group call it with equal arguments and models of the same shapes.
    For a group of one rank, or a module without trainable parameters, returns the module itself.
    Buffers stay local, but each forward pass starts from rank 0's; sparse, ragged or quantized buffers are broadcast
    only once.

    Args:
        find_unused_parameters: find the parameters that a forward pass did not use, so that backward does not wait.
        static_graph: every step uses the same parameters in the same way.
        bucket_cap_mb: size in MiB of the buckets that are reduced at once.
    """
    if any(tensor.device != device for tensor in (*module.parameters(), *module.buffers())):
        module.to(device)  # only where needed: some fake tensors that are on it already cannot be moved
    if group.size() == 1 or not any(parameter.requires_grad for parameter in module.parameters()):
        return module
    with _left_out(module, group):
        replicas = DistributedDataParallel(
            module,
            process_group=group,
            find_unused_parameters=find_unused_parameters,
            static_graph=static_graph,
            bucket_cap_mb=bucket_cap_mb,
            gradient_as_bucket_view=True,  # else gradients exist twice, in the bucket and outside it
        )
    return Replicated(replicas)


@contextmanager
def _left_out(module: nn.Module, group: dist.ProcessGroup) -> Iterator[None]:
    """Broadcast the frozen parameters and buffers that torch cannot send, and make it ignore them inside."""
    frozen = ((name, param) for name, param in module.named_parameters() if not param.requires_grad)
    others = {name: tensor for name, tensor in (*frozen, *module.named_buffers()) if not is_dense(tensor)}
    before = dict(vars(module))
    if others:
        broadcast([(0, [part for tensor in others.values() for part in dense_parts(tensor.detach())])], group)
        ignored = before.get("_ddp_params_and_buffers_to_ignore", ())
        vars(module)["_ddp_params_and_buffers_to_ignore"] = [*ignored, *others]
    try:
        yield
    finally:
        if others:
            vars(module).pop("_ddp_params_and_buffers_to_ignore")
            vars(module).update(before)
