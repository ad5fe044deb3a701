"""Data parallelism: every rank holds the whole module, gradients are averaged while backward runs.

torch's DistributedDataParallel, under which names, state dicts and attributes stay the user's.
Memory: as on one device, since gradients live in the buckets that are reduced. Communication per step: an all-reduce
of the gradients, bucket by bucket, hidden behind the rest of backward.

torch's averages what the first backward pass after each forward pass gives, and lets others go unseen: a second one
with `retain_graph`, that of another output, of the first of two forward passes, of a method or a submodule that was
called by itself, and whatever parameters get that were frozen when it was made. These are averaged here when such a
pass ends, in calls of their own. Gradients that no backward pass has left, but the user, are averaged before the
optimizer steps, and so are all where some were taken by `torch.autograd.grad`: averages stay what they are.
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

from atorch.distributed.collectives import agreed
from atorch.distributed.fingerprints import described_call
from atorch.distributed.tensor_components import dense_parts, is_dense
from atorch.errors import StrategyError
from atorch.logs import logger
from atorch.model.wrapper import Wrapper
from atorch.runtime.data_parallel.buckets import average, broadcast
from atorch.runtime.gradients.backward_targets import Postponed, expects_none, is_captured, postpone, postponed
from atorch.runtime.gradients.weak_method import weakly
from atorch.runtime.optimizer.parameter_groups import TakesParameters
from atorch.runtime.optimizer.wrapped_optimizer import before_steps


class Replicated(TakesParameters, Wrapper):
    """DistributedDataParallel that speaks the user's names: no `module.` before a parameter, attributes reachable.

    It has one and is none: torch.distributed.checkpoint knows one by its type, and insists on names with `module.`.

    Methods and submodules of the user's that are reached through it run on this rank alone, as `generate` should; a
    backward pass through them averages gradients, too.
    """

    def __init__(self, replicas: DistributedDataParallel) -> None:
        super().__init__()
        self.module: nn.Module = replicas.module
        self._replicas = (replicas,)  # in a tuple, or its parameters would be found a second time
        self._averaging = _Averaging(replicas)

    @property
    def replicas(self) -> DistributedDataParallel:
        """The averaging wrapper, for its communication hooks and the like."""
        return self._replicas[0]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output; backward through it averages gradients."""
        self._averaging.begin_forward()
        if torch._C._functorch.peek_interpreter_stack() is not None:  # torch.func's gradients go to who asks for them
            return self.module(*args, **kwargs)
        output = self.replicas(*args, **kwargs)
        if torch.is_grad_enabled() and self.replicas.require_backward_grad_sync:
            self._averaging.expect(output)
        return output

    def prepare_for_backward(self) -> None:
        """Average in the next backward pass, of a forward pass that was told not to; torch's pipelines do it so."""
        self.replicas.reducer.prepare_for_backward([])
        self._averaging.expect()

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside, backward passes add gradients up without averaging them."""
        return self.replicas.no_sync()

    def take_parameters(self, parameters: Iterable[torch.Tensor]) -> None:
        """Average the gradients of parameters that the module was given since it was wrapped, too."""
        self._averaging.take(parameters)


class _Averaging:
    """Sees to it that what backward passes leave is averaged: by DistributedDataParallel, or else when a pass ends."""

    def __init__(self, replicas: DistributedDataParallel) -> None:
        self._replicas = replicas
        self._is_told = replicas.find_unused_parameters or replicas.static_graph  # what a pass leaves unused
        self._expects = self._completes = False  # whether torch reduces the next pass; is given what that has left out
        self._arrived: dict[torch.Tensor, bool] = {}  # in the pass that torch reduces, and whether with a gradient
        self._missed: set[torch.Tensor] = set()  # have gradients that torch does not reduce
        self._has_run = self._was_taken = False  # a pass, since the last step; gradients, by `torch.autograd.grad`
        self._is_none = False  # the gradient that has arrived last
        self._task = -1  # the last pass that was asked whose it is
        self._tasks: set[int] = set()  # passes that run, with those inside of them: reentrant checkpoints run their own
        self._postponed: dict[tuple[Postponed, torch.Tensor], torch.Tensor | None] = {}  # to the gradient before
        self._is_told_of_hooks = False
        self._hooked: list[torch.Tensor] = []
        self._known: list[torch.Tensor] = [each for each in replicas.module.parameters() if each.requires_grad]
        self._frozen: list[torch.Tensor] = [each for each in replicas.module.parameters() if not each.requires_grad]
        self._unfrozen: list[torch.Tensor] = []
        self._hook(self._known)

    def expect(self, output: Any = None) -> None:
        """torch reduces the next backward pass, which may begin at `output`."""
        self._expects = True
        self._arrived.clear()
        self._tasks.clear()  # a pass that raised has not ended
        for each in _find_tensors(output):
            if each.grad_fn is not None:
                each.register_hook(weakly(self._begin))

    def begin_forward(self) -> None:
        """Watch parameters that have been unfrozen since the last one; forget a backward pass that was cleared."""
        if not torch.is_grad_enabled():
            return
        postpone(self._hooked, weakly(self._postpone))
        if self._has_run:
            self._has_run = any(each.grad is not None for each in (*self._known, *self._unfrozen))
        found = [each for each in self._frozen if each.requires_grad]
        if found:
            self._frozen = [each for each in self._frozen if not each.requires_grad]
            self._watch(found)

    def take(self, parameters: Iterable[torch.Tensor]) -> None:
        """Watch parameters that the module was given since, and let them be equal on all ranks."""
        old = set(map(id, (*self._known, *self._frozen, *self._unfrozen)))
        new = [each for each in parameters if id(each) not in old]
        broadcast([(0, new)], self._replicas.process_group)
        self._frozen += [each for each in new if not each.requires_grad]
        self._watch([each for each in new if each.requires_grad])

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
        """Note whether there is one, and, once a pass, whether they go to whoever called `torch.autograd.grad`."""
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
        """Raise for what torch would take for a second gradient of one pass, and for a fault of its own."""
        if self._replicas.find_unused_parameters and len(self._tasks) > 1:
            raise StrategyError(
                "find_unused_parameters=True does not see what a reentrant checkpoint uses, which runs a backward pass "
                "of its own: checkpoint with use_reentrant=False, or leave find_unused_parameters out"
            )
        if parameter in self._arrived and not self._is_told:
            name = next(name for name, each in self._replicas.module.named_parameters() if each is parameter)
            raise StrategyError(
                f"{name} is used in two reentrant checkpoints, and gets a gradient from each: "
                "checkpoint with use_reentrant=False, or give ddp static_graph=True"
            )

    def _begin(self, *_: Any) -> None:
        """See to the end of the pass that runs, behind what torch does there."""
        task = torch._C._current_graph_task_id()
        if task not in self._tasks:
            self._tasks.add(task)
            queue: Any = torch.autograd.Variable._execution_engine
            queue.queue_callback(lambda: queue.queue_callback(partial(self._end, task)))

    def _end(self, task: int) -> None:
        self._tasks.discard(task)
        is_inside = torch._C._current_autograd_node() is not None  # of another pass, which goes on
        is_reduced = self._expects and bool(self._arrived)
        if is_reduced:
            if is_inside and (self._is_told or len(self._arrived) < len(self._known)):
                return
            self._complete()
        if not self._replicas.require_backward_grad_sync:
            return
        if self._unfrozen if is_reduced else self._missed:
            # What was averaged before stays as it is, since averages are the same everywhere.
            candidates = self._unfrozen if is_reduced else [*self._known, *self._unfrozen]
            average_gradients(candidates, self._replicas.process_group, self._missed)
            self._missed.clear()
        self._run_hooks()

    def _postpone(self, hook: Postponed, parameter: torch.Tensor) -> None:
        if self._completes or (hook, parameter) in self._postponed:
            return
        if not self._replicas.require_backward_grad_sync and not self._is_told_of_hooks:
            self._is_told_of_hooks = True
            logger.warning(
                "hooks on gradients run once for all passes within no_sync and the one after them, on what these give "
                "together: only then is it averaged"
            )
        before = parameter.grad if hook.takes_gradient else None
        self._postponed[hook, parameter] = None if before is None else before.clone()

    @torch.no_grad()
    def _run_hooks(self) -> None:
        """Call users' hooks on averages, on every rank on those that another's pass has given, too."""
        hooks, self._postponed = self._postponed, {}
        for hook, parameter in sorted(hooks, key=lambda each: not each[0].takes_gradient):
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
        """Let torch's reduction end where the pass has left parameters out; what no rank has used gets no gradient."""
        self._expects = False
        self._missed.difference_update(self._known)
        if self._is_told:
            self._replicas._check_reducer_finalized()
            return
        used = [self._arrived.get(each, each.grad is not None) for each in self._known]
        lacking = [each for each in self._known if each not in self._arrived]
        elsewhere = [(hook, each) for each in lacking if each.grad is None for hook in postponed(each)]
        if lacking:
            self._give_zeros(lacking)
        group = self._replicas.process_group
        if dist.get_backend(group) == "fake":
            return
        flags = torch.tensor(used, dtype=torch.uint8, device=self._known[0].device)
        # Nobody waits for it who has used everything.
        work = dist.all_reduce(flags, dist.ReduceOp.MAX, group=group, async_op=flags.device.type == "cpu")
        if not all(used):
            if work is not None:
                work.wait()
            for parameter, anywhere in zip(self._known, flags.tolist(), strict=True):
                if not anywhere:
                    parameter.grad = None
        self._postponed.update(dict.fromkeys(elsewhere))

    def _give_zeros(self, parameters: Sequence[torch.Tensor]) -> None:
        """Add nothing to gradients, for which torch waits."""
        frozen = [each for each in parameters if not each.requires_grad]
        self._completes = True
        try:
            for each in frozen:
                each.requires_grad_(True)
            torch.autograd.backward(list(parameters), [torch.zeros_like(each) for each in parameters])
        finally:
            self._completes = False
            for each in frozen:
                each.requires_grad_(False)

    def before_step(self, _: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Average what is there without a backward pass; what one has left, users may edit as they like."""
        self._average_by_hand()
        given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        name, closure = next(((k, v) for k, v in given.items() if k in (1, "closure") and callable(v)), (None, None))
        if closure is None:
            return None

        def averaged() -> Any:
            loss = closure()
            self._average_by_hand()
            return loss

        given[name] = averaged
        return tuple(given[place] for place in range(len(args))), {key: given[key] for key in kwargs}

    def _average_by_hand(self) -> None:
        by_hand, self._has_run, self._was_taken = not self._has_run or self._was_taken, False, False
        if by_hand and any(each.grad is not None for each in self._replicas.module.parameters()):
            average_gradients(list(self._replicas.module.parameters()), self._replicas.process_group)


def average_before_steps(optimizer: Optimizer | None, models: Iterable[nn.Module]) -> None:
    """Let the steps of `optimizer` find gradients averaged that were assigned by hand, as from `torch.autograd.grad`.

    models: what `replicate` made.
    """
    for model in models:
        if isinstance(model, Replicated):
            before_steps(optimizer, weakly(model._averaging.before_step))


def average_gradients(
    parameters: Sequence[torch.Tensor], group: dist.ProcessGroup, changed: Collection[torch.Tensor] | None = None
) -> None:
    """Average `.grad` over the ranks of a group, where any of them has one; one that has none counts as zero.

    changed: on this rank; what no rank has changed is left alone.
    """
    has = torch.tensor(
        [each.grad is not None and (changed is None or each in changed) for each in parameters],
        dtype=torch.uint8,
        device=parameters[0].device,
    )
    dist.all_reduce(has, dist.ReduceOp.MAX, group=group)
    having = [each for each, anywhere in zip(parameters, has.tolist(), strict=True) if anywhere]
    for parameter in having:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    average([each.grad for each in having if each.grad is not None], group)


def replicas_of(model: nn.Module) -> DistributedDataParallel | None:
    """The averager of the gradients of `model`; None where nothing of torch's averages."""
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
    is_agreed: bool = False,
) -> nn.Module:
    """`module` on `device`, equal on all ranks of `group` (rank 0's values), its gradients averaged over them.

    A group of one rank and a module with nothing to train come back as they are: there is nothing to average.
    Buffers stay local except that each forward pass starts from rank 0's; those that are sparse, ragged or quantized do
    so once.

    Args:
        find_unused_parameters: look for parameters that a forward pass did not use, for which backward must not wait.
        static_graph: every step uses the same parameters in the same way.
        bucket_cap_mb: size in MiB of the buckets that are reduced at once.
        is_agreed: the ranks are known to call this alike; else they compare models and arguments.

    Raises:
        ArgumentError: the ranks gave different models or arguments; on all of them, with the models as they were.
    """
    if not is_agreed:
        given = {
            "find_unused_parameters": find_unused_parameters,
            "static_graph": static_graph,
            "bucket_cap_mb": bucket_cap_mb,
        }
        agreed("replicate", lambda: described_call(module, **given), lambda: None, group=group)
    if any(tensor.device != device for tensor in (*module.parameters(), *module.buffers())):
        module.to(device)  # fakes that are on it already cannot all be moved
    if group.size() == 1 or not any(parameter.requires_grad for parameter in module.parameters()):
        return module
    with _left_out(module, group):
        replicas = DistributedDataParallel(
            module,
            process_group=group,
            find_unused_parameters=find_unused_parameters,
            static_graph=static_graph,
            bucket_cap_mb=bucket_cap_mb,
            gradient_as_bucket_view=True,  # else gradients exist twice, in the bucket and beside it
        )
    return Replicated(replicas)


@contextmanager
def _left_out(module: nn.Module, group: dist.ProcessGroup) -> Iterator[None]:
    """Inside, torch's leaves out the frozen parameters and the buffers that it cannot send, which are sent here."""
    frozen = ((name, each) for name, each in module.named_parameters() if not each.requires_grad)
    others = {name: each for name, each in (*frozen, *module.named_buffers()) if not is_dense(each)}
    before = dict(vars(module))
    if others:
        broadcast([(0, [part for each in others.values() for part in dense_parts(each.detach())])], group)
        known = before.get("_ddp_params_and_buffers_to_ignore", ())
        vars(module)["_ddp_params_and_buffers_to_ignore"] = [*known, *others]
    try:
        yield
    finally:
        if others:
            vars(module).pop("_ddp_params_and_buffers_to_ignore")
            vars(module).update(before)
