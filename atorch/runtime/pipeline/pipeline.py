"""The user's view of a pipeline: a model and a loss function in the usual training loop.

    model = Pipeline(engine, ties, names)
    loss_func = PipelinedLoss(model, loss_func, count_of)
    loss = loss_func(batch, model(**batch))      # runs the schedule; every process gets the loss
    loss.backward()                              # hands the gradients over

With gradients enabled the model returns a `Deferred`, which the loss function computes. Under `torch.no_grad()` the
full batch passes the stages as one micro-batch, and every process gets the model's output.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from atorch.distributed.collectives import all_or_none, is_fake_world
from atorch.errors import ArgumentError, StrategyError
from atorch.logs import logger
from atorch.model.pytree import leaves_of, map_leaves, map_tensors, tensors_in
from atorch.model.state import children_in_eval
from atorch.model.user_functions import LossFunc, value_of
from atorch.model.wrapper import Wrapper
from atorch.runtime.data.batches import merge, num_rows, take
from atorch.runtime.data_parallel.buckets import broadcast
from atorch.runtime.data_parallel.gradient_sync import GradientSync
from atorch.runtime.gradients.backward import expects_none, is_captured, weakly
from atorch.runtime.loss.reduction import Gathered, LossWeight, Rule
from atorch.runtime.loss.reduction_probe import BatchAndOutput, ReductionProbe
from atorch.runtime.loss.rescaling import LossRescaler, weighted
from atorch.runtime.memory.deferred_output import Deferred, SeparateGradients, deposit_loss
from atorch.runtime.pipeline.engine import Engine, StageCalls
from atorch.runtime.pipeline.placeholders import TensorSpec, shape_of
from atorch.runtime.pipeline.stage_placement import SharedParameters

_Call = tuple[Any, tuple[Any, ...], dict[str, Any]]  # (batch, the model's positional and keyword arguments)


class Pipeline(Wrapper):
    """The stages of this process, called as the whole model is. Parameters keep their names in the whole model."""

    def __init__(self, engine: Engine, ties: SharedParameters, names: Sequence[str]) -> None:
        super().__init__()
        self.engine, self.ties = engine, ties
        self.state_names = tuple(names)  # of the whole model's state, in its order
        self.tied_names = ties.names
        self.others = nn.ModuleList(engine.parts[1:])
        self.module = engine.parts[0]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """A deferred output, or, without gradients, the output itself on every process.

        Raises:
            ArgumentError: an argument requires a gradient, which only the first stage's process would get.
        """
        if torch.is_grad_enabled():
            for place, leaf in leaves_of({**dict(enumerate(args)), **kwargs}, "argument"):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    raise ArgumentError(
                        f"{place} of the pipelined model requires a gradient, which only the first "
                        "stage's process would get; detach it, or let a module of the model compute it"
                    )
            return Deferred(self, args, kwargs)
        outputs: list[Any] = []

        def keep(number: int, output: Any) -> Tensor:
            outputs.append(output)
            return torch.zeros(())

        engine = self.engine
        engine.run(StageCalls([(args, kwargs)], keep), train=False)
        return from_place(outputs[0] if outputs else None, engine.last_place, engine.group, engine.device)

    def _assign(self, name: str, value: Any) -> None:
        if isinstance(value, nn.Module):
            raise ArgumentError(
                f"{name} was given another module, and those of a pipelined model are on its stages; replace it before "
                "auto_accelerate"
            )
        for part in self.engine.parts:
            setattr(part, name, value)

    def __deepcopy__(self, memo: Any) -> Any:
        raise ArgumentError(
            "a pipelined model cannot be copied: its stages are on several processes, which run them together. Copy "
            "what this process has, model.state_dict(), or what all have, atorch.whole_state(model)"
        )

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """The modules of all stages on this process, by their names in the whole model."""
        for part in self.engine.parts:
            yield from part.named_modules(memo, prefix, remove_duplicate)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The state of the stages on this process, by names in the whole model."""
        for hook in self._state_dict_pre_hooks.values():
            hook(self, "", False)
        state, *others = (part.state_dict(*args, **kwargs) for part in self.engine.parts)
        for other in others:
            state.update(other)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load the part of a state, which may be the whole model's, for the stages on this process."""
        unknown = sorted(state_dict.keys() - set(self.state_names))
        if strict and unknown:
            raise RuntimeError(f"the model has no {', '.join(unknown)}; load with strict=False to leave them out")
        for part in self.engine.parts:
            part_state = {name: state_dict[name] for name in part.state_dict() if name in state_dict}
            result = part.load_state_dict(part_state, strict=strict, assign=assign)
        return result

    @property
    def counted_elsewhere(self) -> Collection[Tensor]:
        """Parameters that another process also has and counts in norms: see `clip.Spread`."""
        return self.ties.counted_elsewhere


class PipelinedLoss:
    """The loss function that runs a pipeline.

    count_of: returns the number of micro-batches for a number of rows, which it divides.
    over_ranks: returns the weight of a rank's loss among those of ranks with other samples, by the same rule.
    loss_weight, tolerance, replicas (its group): see `LossWeight`. If no rule explains the loss, the last stage runs it
        once on the outputs of all micro-batches. It keeps all of them until the first backward.
    """

    def __init__(
        self,
        model: Pipeline,
        loss_func: LossFunc,
        count_of: Callable[[int], int],
        loss_weight: Rule = "auto",
        tolerance: float = 1e-4,
        replicas: dist.ProcessGroup | None = None,
        over_ranks: Callable[[LossWeight], LossRescaler | None] = lambda rule: None,
    ) -> None:
        self._model, self._engine = model, model.engine
        self._loss_func, self._count_of = loss_func, count_of
        self._weight: LossWeight | None = LossWeight(loss_weight, tolerance, replicas)
        self._ranks = over_ranks(self._weight)
        self._is_auto, self._tolerance = loss_weight == "auto", tolerance
        parameters = list(dict.fromkeys(model.parameters()))  # now: while unsharded, FSDP2 has other parameters
        self._apart = SeparateGradients(parameters, [GradientSync(part) for part in self._engine.parts])
        self._named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        for name, parameter in self._named.items():
            parameter.register_hook(expects_none(partial(weakly(self._refuse_direct), name)))
        self._plain: torch.dtype | None = None  # the dtype of a loss that is a bare scalar
        self._oracle_loss: Any = None  # the loss that the oracle computed

    def __call__(self, batch: Any, output: Any) -> Any:
        """The loss, as the user's function returns it, on every process.

        Raises:
            ArgumentError: tensors of the batch differ in dimension 0.
            StrategyError: no rule gives the weights of the losses.
        """
        if not isinstance(output, Deferred):
            return self._loss_func(batch, output)
        call: _Call = (batch, *output.call()[1:])
        with torch.enable_grad():
            pieces, size = self._cut(call)
            weights = self._weights(call, pieces, size)
            return self._run(batch, pieces, weights, self._factor(call, weights is None))

    def _refuse_direct(self, name: str, gradient: Tensor | None) -> None:
        if gradient is None or self._apart.is_open:
            return
        if not is_captured(get_gradient_edge(self._named[name]).node):
            raise ArgumentError(
                f"backward came to {name} by another path than the loss of loss_func, such as a penalty that the loop "
                "computes of model.parameters(). A process has only those of its own stages. Compute it in "
                "loss_func, which gets all parameters that it reads, or use the optimizer's weight_decay"
            )

    def _factor(self, call: _Call, is_gathered: bool) -> float:
        """The factor of gradients for ranks: applied here, as gradients are reduced before the loss hands them over."""
        batch, args, kwargs = call
        if self._ranks is None:
            return 1.0
        value = torch.zeros((), device=self._engine.device)

        def run(samples: Sequence[BatchAndOutput], runs_model: bool) -> list[float]:
            return self._losses([(batch, *call) for batch, call in samples])

        probe = ReductionProbe(self._ranks.rule, run, batch, value, output=None, call=(args, kwargs))
        if is_gathered:
            self._ranks.give_up(probe.failure("no rule explains it"))
        rows = num_rows(batch=batch, args=args, kwargs=kwargs)
        return self._ranks.share(batch, rows, probe).factor()

    def settle(self, batch: Any, output: Deferred) -> None:
        """Find the rule on a sample by which losses of micro-batches make the batch's; later batches refine it.

        Raises:
            StrategyError: no rule does; raised on all processes, as are other errors of the model or the loss.
        """
        if self._is_auto:
            call: _Call = (batch, *output.call()[1:])
            with torch.enable_grad():
                self._weights(call, *self._cut(call))
            for reduction in self._engine.reductions:
                reduction.reshard()

    def _cut(self, call: _Call) -> tuple[list[_Call], int]:
        batch, args, kwargs = call
        rows = num_rows(batch=batch, args=args, kwargs=kwargs)
        size = rows // self._count_of(rows)
        return [take(call, start, start + size, rows) for start in range(0, rows, size)], size

    def _run(self, batch: Any, pieces: Sequence[_Call], weights: Sequence[float] | None, factor: float) -> Any:
        losses: list[Any] = []

        def conclude(number: int, output: Any) -> Tensor:
            assert weights is not None
            loss = self._loss_func(pieces[number][0], output)
            losses.append(map_tensors(Tensor.detach, loss))
            return weighted(value_of(loss), weights[number] * factor, output)

        gathered = Gathered(batch, self._loss_func, len(pieces)) if weights is None else None
        with self._apart.gradients() as gradients:
            calls = [piece[1:] for piece in pieces]
            work = StageCalls(calls, conclude if gathered is None else gathered)
            self._engine.run(work, train=True, whole=gathered is not None)
            self._model.ties.add_up()
        if gathered is not None:
            losses, weights = [gathered.loss], [1.0]
        loss = self._shared(merge(losses, weights or []) if losses else self._loss_elsewhere(pieces[0]))
        return deposit_loss(loss, gradients)

    def _loss_elsewhere(self, piece: _Call) -> Any:
        """The loss on processes without the last stage: None, but in a fake world the oracle's."""
        oracle = self._engine.oracle
        if oracle is not None and self._oracle_loss is None:
            with torch.no_grad():
                self._oracle_loss = self._loss_func(piece[0], oracle.run(*piece[1:])[1])
        return self._oracle_loss

    def _shared(self, loss: Any) -> Any:
        """The last stage's loss on every process."""
        engine = self._engine
        if self._plain is None:
            loss = from_place(loss, engine.last_place, engine.group, engine.device)
            self._plain = loss.dtype if isinstance(loss, Tensor) else None
            return loss
        if engine.group.rank() != engine.last_place:
            loss = torch.empty((), dtype=self._plain, device=engine.device)
        dist.broadcast(loss, group=engine.group, group_src=engine.last_place)
        return loss

    def _weights(self, call: _Call, pieces: Sequence[_Call], size: int) -> list[float] | None:
        """The weights of the micro-batches' losses; None where all outputs together give the loss."""
        if self._weight is None:
            return None

        def pair_losses(first: int) -> tuple[float, float, float]:
            second = min(first + 1, len(pieces) - 1)
            both = take(call, first * size, (second + 1) * size, size * len(pieces))
            one, two, whole = self._losses([pieces[first], pieces[second], both])
            return one, two, whole

        try:
            batches = [batch for batch, _, _ in pieces]
            return self._weight.weights(batches, [size] * len(pieces), pair_losses)
        except StrategyError as error:
            if not self._is_auto:
                raise
            self._check_gathering(call, pieces, size, error)
        self._weight = None
        logger.warning(
            "no weights make the loss of a batch of those of its micro-batches; it is taken once, of all outputs, "
            "and activations of all micro-batches are held until then"
        )
        return None

    def _losses(self, calls: Sequence[_Call]) -> list[float]:
        """The loss of each call, without gradients, on every process."""
        losses: list[float] = []

        def note(number: int, output: Any) -> None:
            losses.append(self._value(call[0], output))

        for call in calls:
            self._look(call, note)
        return self._floats(losses, len(calls))

    def _look(self, call: _Call, see: Callable[[int, Any], None]) -> None:
        """Run a call without gradients, and pass the last stage's output to `see`."""

        def conclude(number: int, output: Any) -> Tensor:
            see(number, output)
            return torch.zeros(())

        with torch.no_grad(), ExitStack() as stack:
            for part in self._engine.parts:
                stack.enter_context(children_in_eval(part))
            all_or_none(lambda: self._engine.run(StageCalls([call[1:]], conclude), train=False))

    def _value(self, batch: Any, output: Any) -> float:
        return float(value_of(self._loss_func(batch, output)))

    def _floats(self, values: Sequence[float], count: int) -> list[float]:
        engine = self._engine
        sent = torch.tensor(values or [1.0] * count, dtype=torch.float64, device=engine.device)
        dist.broadcast(sent, group=engine.group, group_src=engine.last_place)
        return [float(value) for value in sent.tolist()]

    def _check_gathering(self, call: _Call, pieces: Sequence[_Call], size: int, error: StrategyError) -> None:
        """Check that two merged outputs have the loss of both micro-batches run as one; else raises `error`."""
        pair = [pieces[0], pieces[min(1, len(pieces) - 1)]]
        both = take(call, 0, min(2, len(pieces)) * size, size * len(pieces))
        outputs: list[Any] = []
        losses: list[float] = []
        for piece in pair:
            self._look(piece, lambda number, output: outputs.append(output))
        self._look(both, lambda number, output: losses.append(self._value(both[0], output)))
        if outputs:
            losses.append(self._value(both[0], merge(outputs, [0.5, 0.5])))
        whole, merged = self._floats(losses, 2)
        if len(pieces) > 1 and abs(whole - merged) > self._tolerance * max(abs(whole), 1e-30):
            raise error


def from_place(data: Any, place: int, group: dist.ProcessGroup, device: torch.device) -> Any:
    """Broadcast `data` from rank `place` of the group; returns it with detached tensors.

    In a fake world returns this process's data.
    """
    result = map_tensors(lambda leaf: leaf.detach().contiguous(), data)
    box = [map_tensors(lambda leaf: _Place(shape_of(leaf)), result)]
    if not is_fake_world():
        via = device if dist.get_backend(group) == "nccl" else None
        dist.broadcast_object_list(box, group=group, group_src=place, device=via)

    def empty(leaf: Any, where: str) -> Any:
        return torch.empty(leaf.shape[0], dtype=leaf.shape[1], device=device) if isinstance(leaf, _Place) else leaf

    if group.rank() != place:
        result = map_leaves(empty, box[0])
    broadcast([(place, tensors_in(result))], group)
    return result


class _Place:
    def __init__(self, shape: TensorSpec) -> None:
        self.shape = shape
