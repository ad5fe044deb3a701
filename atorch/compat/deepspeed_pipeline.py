"""Stages under DeepSpeed's pipeline engine, which trains whole batches: forward, backward, reduction and step in one.

Each stage is one layer of DeepSpeed's `PipelineModule`. It reads its arguments of the micro-batch here, so models may
have any arguments and outputs. Between stages, DeepSpeed sends only floating-point tensors that need gradients, and
integers. Its ranks are pipeline × data × tensor, the last varying fastest. Needs the package deepspeed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from atorch.errors import ArgumentError, StrategyError
from atorch.model.user_functions import LossFunc, value_of
from atorch.runtime.data.batches import num_rows, take
from atorch.runtime.loss.reduction import LossWeight, Rule
from atorch.runtime.loss.rescaling import LossRescaler
from atorch.runtime.memory.deferred_output import Deferred
from atorch.runtime.optimizer.wrapped_optimizer import WrappedOptimizer
from atorch.runtime.pipeline.engine import Engine, LocalStage, StageCalls
from atorch.runtime.pipeline.pipeline import Pipeline, PipelinedLoss


class WholeBatches(PipelinedLoss):
    """Trains `model` on whole batches by DeepSpeed's 1F1B.

    optimizer: that of the parameters of this process's stage.
    sizes: those of the axes pipeline, data and tensor.
    rows: the number of rows of every batch of this process.
    config: DeepSpeed's, except what is set here: batch sizes, and the ZeRO stage `zero_stage` (0 or 1).

    Raises:
        StrategyError: a stage outputs values that DeepSpeed cannot send.
    """

    def __init__(
        self,
        model: Pipeline,
        loss_func: LossFunc,
        count_of: Callable[[int], int],
        optimizer: Optimizer,
        *,
        sizes: tuple[int, int, int],
        rows: int,
        zero_stage: int = 0,
        config: Mapping[str, Any] | None = None,
        loss_weight: Rule = "auto",
        tolerance: float = 1e-4,
        over_ranks: Callable[[LossWeight], LossRescaler | None] = lambda rule: None,
    ) -> None:
        super().__init__(model, loss_func, count_of, loss_weight, tolerance, over_ranks=over_ranks)
        _need_sendable(self._engine)
        self._rows, self._count = rows, count_of(rows)
        settled = {
            "train_micro_batch_size_per_gpu": rows // self._count,
            "gradient_accumulation_steps": self._count,
            "zero_optimization": {"stage": zero_stage},
            "zero_allow_untested_optimizer": True,
            "steps_per_print": None,
            # Every tensor rank sends full tensors.
            "pipeline": {"pipe_partitioned": False, "grad_partitioned": False},
        }
        self._layer = _Layer(self._engine)
        self.deepspeed = _initialized(
            self._layer, model, optimizer, sizes, {"gradient_clipping": 0.0, **(config or {}), **settled}
        )

    def __call__(self, batch: Any, output: Any) -> Any:
        """The loss of an output that was computed without gradients.

        Raises:
            TypeError: the output is deferred.
        """
        if isinstance(output, Deferred):
            raise TypeError("DeepSpeed's pipeline trains whole batches; call result.step(batch) in place of the loop")
        return super().__call__(batch, output)

    def step(self, batch: Any, deferred: Deferred) -> Tensor:
        """Run forward, backward, reduction and the optimizer's step on a batch; return the mean loss of all processes.

        Raises:
            ArgumentError: the batch has another number of rows than those before.
            StrategyError: no weights make the batch's loss of those of its micro-batches.
        """
        _, args, kwargs = deferred.call()
        call = (batch, args, kwargs)
        rows = num_rows(batch=batch, args=args, kwargs=kwargs)
        if rows != self._rows:
            raise ArgumentError(
                f"a batch has {rows} rows, and DeepSpeed's pipeline was made for {self._rows}; set drop_last"
            )
        size = rows // self._count
        pieces = [take(call, start, start + size, rows) for start in range(0, rows, size)]
        weights = self._weights(call, pieces, size)
        if weights is None:
            raise StrategyError(
                "no weights make the batch's loss of its micro-batches', and DeepSpeed takes the loss of each alone; "
                "leave the deepspeed backend out"
            )

        factor = self._factor(call, False)

        def weighted(number: int, output: Any) -> Tensor:
            # DeepSpeed takes the mean over micro-batches.
            loss = value_of(self._loss_func(pieces[number][0], output))
            return loss * (weights[number] * len(pieces) * factor)

        self._layer.number = 0
        dummy = torch.zeros(1)
        with torch.enable_grad(), self._engine.working_on(StageCalls([piece[1:] for piece in pieces], weighted)):
            loss: Tensor = self.deepspeed.train_batch(iter([(dummy, dummy)] * len(pieces)))
        return loss.detach().reshape(())


class SteppedByDeepSpeed(WrappedOptimizer):
    """The optimizer, which DeepSpeed steps with the batch."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Refuse to step: DeepSpeed steps with the batch.

        Raises:
            TypeError: always.
        """
        raise TypeError("DeepSpeed's pipeline steps with the batch; call result.step(batch) in place of the loop")


class _Layer(nn.Module):
    """A stage as DeepSpeed calls it: with its inputs, for the next micro-batch."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.piece: LocalStage = engine.pieces[0]
        self.number = 0

    def forward(self, inputs: Any) -> Any:
        """The input of the next stage, or the loss."""
        number, self.number = self.number, self.number + 1
        return self.piece(*(inputs if isinstance(inputs, tuple) else (inputs,)), number=torch.tensor(number))


def _initialized(
    layer: _Layer, model: Pipeline, optimizer: Optimizer, sizes: tuple[int, int, int], config: dict[str, Any]
) -> Any:
    import deepspeed
    from deepspeed.pipe import PipelineModule
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    class Stages(PipelineModule):  # type: ignore[misc]
        def get_tied_weights_and_groups(self) -> list[Any]:
            """Add up gradients of tied parameters; DeepSpeed calls this before it reduces gradients."""
            model.ties.add_up()
            return []

    deepspeed.init_distributed(dist_init_required=False, verbose=False)  # it uses the existing process group
    stages, replicas, parts = sizes
    index = layer.piece.stage.index
    layers = [layer if stage == index else nn.Identity() for stage in range(stages)]
    topology = PipeModelDataParallelTopology(num_pp=stages, num_mp=parts, num_dp=replicas)
    module = Stages(layers, topology=topology, partition_method="uniform", dynamic_shape=True)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config, dist_init_required=False)
    return engine


def _need_sendable(engine: Engine) -> None:
    """Raise if DeepSpeed cannot send a value: it expects a gradient for every floating-point tensor."""
    for stage in engine.stages:
        route = stage.route
        for value in stage.outgoing:
            if value.call not in route.trained:
                raise StrategyError(
                    f"{route.calls[value.call].unit} hands a tensor without gradient over to a later stage, and "
                    "DeepSpeed sends none such back; set split_points elsewhere, or leave the deepspeed backend out"
                )
