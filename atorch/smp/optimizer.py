"""`smp.DistributedOptimizer`: the optimizer of a model that is partitioned over processes, and norms over all parts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from atorch.distributed.collectives import call_on_all_ranks
from atorch.errors import ArgumentError, check_bools, shown
from atorch.logs import OF_THIS_RANK, logger
from atorch.runtime.gradients.clip import Spread, clip_grads, parts_of
from atorch.runtime.optimizer.held_tensors import held_tensors, whole_states, write_states
from atorch.runtime.optimizer.wrapped_optimizer import WrappedOptimizer, local_state_dict
from atorch.runtime.precision.amp import ScaledOptimizer
from atorch.smp.checkpointing.states import CUTS, PARTIAL, meet, merged_state
from atorch.smp.inner_optimizer import stepping
from atorch.smp.model import DistributedModel
from atorch.smp.session import session
from atorch.smp.steps.precision import half_of, loss_scale_of
from atorch.smp.steps.runner import Runner


def spread_of(model: DistributedModel) -> Spread:
    """The distribution of a partitioned model over processes: pipeline stages, and parts on tensor ranks."""
    placed: Any = model.placed()
    parts, ties = parts_of(placed, placed._atorch), model.runner and model.runner.ties
    if not ties:
        return Spread(parts=parts)
    return Spread((session().mesh.group("pipeline"),), parts, ties.counted_elsewhere)


def clip(
    model: DistributedModel, parameters: Iterable[Tensor], call: str, max_norm: float, norm_type: float = 2.0
) -> Tensor:
    """Clip the gradients of this process's `parameters`, as `DistributedModel.clip_grad_norm_` does.

    call: name of the script's call, for errors.

    Raises:
        ArgumentError: the model is not partitioned yet, or `max_norm` or `norm_type` is not above 0.
    """
    runner = _runner_of(model, call)
    norm_type = math.inf if norm_type == "inf" else norm_type  # type: ignore[comparison-overlap]
    for name, value in (("max_norm", max_norm), ("norm_type", norm_type)):
        if isinstance(value, bool) or not isinstance(value, Real) or not float(value) > 0:
            raise ArgumentError(f"{call} was given {shown(value)} as {name}; give a number above 0")
    if not model.joins:  # inside `join` some replicas may have no batches left
        call_on_all_ranks(call, dict, lambda: None, is_frequent=True)  # detects processes that skip this call
    spread, scale = spread_of(model), runner.loss_scale
    return clip_grads(parameters, max_norm * scale, norm_type, spread) / scale


def _runner_of(model: DistributedModel, call: str) -> Runner:
    if model.runner is None:
        raise ArgumentError(f"{call} was called before the first smp.step, which makes gradients; call it after")
    return model.runner


OptimizerState = dict[str, Any]


class DistributedOptimizer(WrappedOptimizer):
    """An optimizer that steps the parameters of this process's part of the model, once it is partitioned.

    State dicts are keyed by parameter names: of one process's part, or of the whole model, for any number of processes.
    Learning-rate schedulers accept it as an optimizer.

    Under `fp16` and `bf16` it steps fp32 masters. Under `fp16` it scales the loss of `model.backward`, and skips a step
    on all processes if a gradient is not finite.

    Args:
        optimizer: any torch optimizer over parameters of the `DistributedModel`.
        static_loss_scale: under `fp16`, the constant loss scale; None for 1.
        dynamic_loss_scale: under `fp16`, shrink the scale after skipped steps, and grow it after many good ones.
        dynamic_loss_args: settings of the dynamic scale: `init_scale`, `scale_factor`, `scale_window`, `min_scale`,
            `delayed_shift` and `consecutive_hysteresis`, as in `precision.DynamicScale`; also as keyword arguments.

    Raises:
        ArgumentError: `optimizer` is not one, has parameters that are not the model's, or a setting is invalid.
    """

    def __init__(
        self, optimizer: Optimizer, static_loss_scale: float | None = 1.0, dynamic_loss_scale: bool = False,
        dynamic_loss_args: Mapping[str, Any] | None = None, **settings: Any,
    ) -> None:  # fmt: skip
        owner = session()
        if not isinstance(optimizer, Optimizer):
            raise ArgumentError(f"smp.DistributedOptimizer was given {shown(optimizer)}; give a torch.optim.Optimizer")
        if not isinstance(owner.model, DistributedModel):
            raise ArgumentError(
                "smp.DistributedOptimizer was made before the model; make the smp.DistributedModel first"
            )
        if owner.optimizer is not None:
            raise ArgumentError(
                "a second smp.DistributedOptimizer was made; a script has one, with a group for each kind"
            )
        scale = loss_scale_of(static_loss_scale, dynamic_loss_scale, dynamic_loss_args, settings)
        super().__init__(optimizer)
        self._model = owner.model
        self.optimizer = optimizer
        """The wrapped optimizer; schedulers may be constructed from it."""
        self._synced: tuple[Tensor, int, Tensor] | None = None  # a correct gradient, its version and values
        self._was_told = False
        self._scale = scale if owner.config.fp16 else None
        if self._scale is None and (dynamic_loss_scale or static_loss_scale not in (None, 1.0)):
            logger.info("the loss is not scaled: fp16 is not set in the configuration")
        self._names = [self._names_of(group) for group in self.param_groups]
        owner.optimizer = self
        if self._model.partitioned:
            self.follow(self._model)

    def follow(self, model: DistributedModel, values: WeakTensorKeyDictionary | None = None) -> None:
        """Step the partitioned model's local parameters from now on. All processes call this together.

        values: values of the 16-bit parameters before rounding, by parameter.

        Raises:
            StrategyError: the optimizer steps differently if its parameters are spread over processes.
        """
        owner, local = session(), dict(model.named_parameters())
        for group, names in zip(self.param_groups, self._names, strict=True):
            group["params"][:] = [local[name] for name in names if name in local]
        replicas = owner.mesh.group("data", "zero")
        self.inner = stepping(
            self.optimizer, halves=half_of(owner.config) is not None, values=values, scale=self._scale,
            sharing=replicas if owner.config.shard_optimizer_state and replicas.size() > 1 else None,
            sharded=replicas if owner.config.sharded_data_parallel_degree > 1 else None, device=owner.device,
            spread=spread_of(model),
        )  # fmt: skip
        self._share()

    @property
    def loss_scale(self) -> float:
        """The factor of the loss, and of gradients until the step; 1 unless under `fp16`."""
        return 1.0 if self._scale is None else self._scale()

    @property
    def overflow(self) -> bool:
        """True if the last step was skipped, or `update_master_grads` found a non-finite gradient."""
        return isinstance(self.inner, ScaledOptimizer) and self.inner.step_was_skipped

    def update_master_grads(self) -> None:
        """Check on all processes that all gradients are finite, and set `overflow`. `step` always does so, too."""
        _runner_of(self._model, "update_master_grads")
        if isinstance(self.inner, ScaledOptimizer):
            self.inner.step_was_skipped = self.inner.overflows()

    def clip_master_grads(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale gradients down if the norm of the whole model's exceeds `max_norm`; returns the norm before.

        The norm equals that of plain training, without the loss scale. All processes of a model call it together, after
        a training step.

        Raises:
            ArgumentError: the model is not partitioned yet, or `max_norm` or `norm_type` is not above 0.
        """
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        norm = clip(self._model, parameters, "clip_master_grads", max_norm, norm_type)
        self.mark_synced()
        return norm

    def clip_grad_norm(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """`clip_master_grads`, under the name that the Trainer of transformers 4 calls."""
        return self.clip_master_grads(max_norm, norm_type)

    @torch.no_grad()
    def mark_synced(self) -> None:
        """Take the current gradients as correct, by a copy of the smallest; a later change by the script is reported.

        torch's `clip_grad_norm_` is such a change: it takes the norm of this process's part of the model only, so that
        parts are scaled by different factors. torch is not patched to prevent it.
        """
        self._synced = None
        spread = spread_of(self._model)
        if self._was_told or not (spread.over or spread.parts):
            return
        gradients = [
            leaf.grad for leaf in self._model.parameters() if leaf.grad is not None and not leaf.grad.is_sparse
        ]
        if gradients:
            smallest = min(gradients, key=Tensor.numel)
            self._synced = smallest, smallest._version, smallest.clone()

    def _warn_of_changes(self) -> None:
        """Warn once if the gradients have changed since `mark_synced`."""
        if self._synced is None:
            return
        gradient, version, before = self._synced
        if gradient._version == version or bool((gradient == before).all()):
            return
        self._was_told = True
        logger.warning(
            "gradients were changed between the step and optimizer.step(). Where that was "
            "torch.nn.utils.clip_grad_norm_, it took the norm of this process's part of the model alone. Call "
            "optimizer.clip_master_grads(max_norm), in any precision: it takes the norm of the whole model",
            extra=OF_THIS_RANK,
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters of the model."""
        previous = len(self.inner.param_groups)
        super().add_param_group(param_group)
        for group in self.inner.param_groups[previous:]:
            self._names.append(self._names_of(group))

    def _names_of(self, group: Mapping[str, Any]) -> list[str]:
        names = {parameter: name for name, parameter in self._model.named_parameters()}
        for parameter in group["params"]:
            if parameter not in names:
                raise ArgumentError(
                    f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is not the "
                    "DistributedModel's; make it of model.parameters()"
                )
        return [names[parameter] for parameter in group["params"]]

    def step(self, closure: Any = None) -> Any:
        """Step the local parameters.

        Raises:
            ArgumentError: a closure is given, which cannot run the parts of the model on other processes.
        """
        self._refuse(closure)
        self._warn_of_changes()
        config = session().config
        if config.sharded_data_parallel_degree > 1 and config.sdp_gradient_clipping:
            self.clip_master_grads(config.sdp_gradient_clipping)
        return self.inner.step()

    def local_state_dict(self, gather_if_shard: bool = True) -> OptimizerState:
        """The state of the local parameters, by name, with the key `_smp_is_partial`.

        It communicates only if replicas shard states: all replicas then call it together and get whole tensors.

        Args:
            gather_if_shard: accepted without effect: the state is always gathered. So one replica's files are the
                checkpoint, which loads with any number of replicas.

        Raises:
            ArgumentError: some replicas did not call it; the error lists them.
        """
        check_bools("optimizer.local_state_dict", gather_if_shard=gather_if_shard)
        group = meet("optimizer.local_state_dict()", is_whole=False, states=True)
        named = self._named_state(self._model, group)
        return {**named, PARTIAL: True, CUTS: self._model.split.own_rows(named["state"])}

    def local(self) -> LocalOptimizer:
        """The optimizer as `atorch.save_checkpoint` takes it."""
        return LocalOptimizer(self)

    def state_dict(self) -> OptimizerState:
        """The state of the whole model's parameters, in the format of the wrapped optimizer, which can load it.

        All processes that hold parts of one replica get it.

        Raises:
            ArgumentError: some of them did not call it; the error lists them.
        """
        if not self._model.partitioned:
            return self.inner.state_dict()
        group = meet("optimizer.state_dict()", is_whole=True, states=True)
        named = self._named_state(self._model.placed(), group)
        number = {name: index for index, name in enumerate(itertools.chain(*self._names))}
        groups = [{**part, "params": [number[name] for name in part["params"]]} for part in named["param_groups"]]
        state = {index: named["state"][name] for name, index in number.items() if name in named["state"]}
        return {**named, "state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a whole state, or the partial ones of all processes, now or right after partitioning.

        Raises:
            ArgumentError: the state does not match this optimizer's groups.
        """
        named = self._by_name(merged_state(state_dict, "the optimizer's state"))
        self._model.when_partitioned(lambda: self._load(named))

    def _named_state(self, model: nn.Module, group: dist.ProcessGroup) -> OptimizerState:
        """The state by parameter names, of `model`, the local one or `placed`; processes of `group` have parts."""
        state = whole_states(self.local(), held_tensors(model), group)
        groups = [{**part, "params": list(n)} for part, n in zip(self.param_groups, self._names, strict=True)]
        scale = {"loss_scale": self.inner.scale.state_dict()} if isinstance(self.inner, ScaledOptimizer) else {}
        return {**scale, "state": state, "param_groups": groups}

    def _by_name(self, saved: OptimizerState) -> OptimizerState:
        """A state of torch's format, which numbers parameters, keyed by names."""
        groups = saved.get("param_groups")
        if not isinstance(groups, list) or "state" not in saved or len(groups) != len(self._names):
            raise ArgumentError(
                f"the optimizer was given a state with {shown(list(saved))}; give what its state_dict or "
                f"local_state_dict returned, of {len(self._names)} groups"
            )
        name_of: dict[Any, str] = {}
        for group, names in zip(groups, self._names, strict=True):
            if len(group["params"]) != len(names):
                raise ArgumentError(
                    f"the state has a group of {len(group['params'])} parameters where the optimizer has one of "
                    f"{len(names)}; load what was saved with the same groups"
                )
            name_of.update(
                {key: key if isinstance(key, str) else name for key, name in zip(group["params"], names, strict=True)}
            )
        state = {name_of.get(key, key): entry for key, entry in saved["state"].items()}
        return {**saved, "state": state}

    def _load(self, named: OptimizerState) -> None:
        groups = [{**group, "params": names} for group, names in zip(named["param_groups"], self._names, strict=True)]
        write_states(self.local(), held_tensors(self._model.placed()), {**named, "param_groups": groups})

    def load_local(self, state: OptimizerState) -> None:
        self.inner.load_state_dict(state)
        self._share()
        self.optimizer.param_groups = self.param_groups  # a scheduler may hold it


class LocalOptimizer(WrappedOptimizer):
    """The optimizer of this process's part, as checkpoints see it: with states by the numbers of its parameters."""

    def __init__(self, owner: DistributedOptimizer) -> None:
        self.inner, self._owner = owner.inner, owner  # the constructor of the base would empty the states
        self._share()

    def local_state_dict(self) -> OptimizerState:
        """The state, without communication."""
        return local_state_dict(self.inner)

    def load_state_dict(self, state_dict: OptimizerState) -> None:
        """Load a state of `local_state_dict`."""
        self._owner.load_local(state_dict)
