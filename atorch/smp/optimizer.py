"""The optimizer of a model that is spread over processes: `smp.DistributedOptimizer`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from atorch.distributed.collectives import meet
from atorch.errors import ArgumentError, check_bools, shown
from atorch.logs import logger
from atorch.runtime.optimizer.wrapped_optimizer import WrappedOptimizer
from atorch.runtime.precision.amp import ScaledOptimizer
from atorch.smp.checkpointing.partial_states import CUTS, MARKS, PARTIAL, merged
from atorch.smp.checkpointing.replica_shards import meet_replicas, shards_like, whole_over_shards
from atorch.smp.checkpointing.whole_states import PATIENCE, of_all
from atorch.smp.model import DistributedModel
from atorch.smp.norms import ScaledApart, clip, spread_of
from atorch.smp.session import session
from atorch.smp.tensor.split import TensorSplit
from atorch.smp.training.inner_optimizer import stepping
from atorch.smp.training.precision import half_of, loss_scale_of

OptimizerState = dict[str, Any]


class DistributedOptimizer(WrappedOptimizer):
    """An optimizer that steps the parameters of this process's part of the model, once that is known.

    Its states are known by the names of parameters: of one process's part, or of the whole model, whatever the number
    of processes. Learning-rate schedulers take it for the optimizer that it is given.

    Under `fp16` and `bf16` it steps fp32 masters; under `fp16` the loss that `model.backward` is given is multiplied by
    a scale, and a step is skipped, on all processes, where a gradient is not finite.

    Args:
        optimizer: any of torch's kind, over parameters of the `DistributedModel`.
        static_loss_scale: under `fp16`, what the loss is multiplied by; None is 1.
        dynamic_loss_scale: under `fp16`, let the scale fall where a step is skipped, and grow after many good ones.
        dynamic_loss_args: how: `init_scale`, `scale_factor`, `scale_window`, `min_scale`, `delayed_shift` and
            `consecutive_hysteresis`, as `precision.DynamicScale` says; also one by one.

    Raises:
        ArgumentError: it is none, or has parameters that are not the model's; a setting that does not hold.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        static_loss_scale: float | None = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
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
        """The optimizer that was given, for schedulers that are made of it."""
        self._scaled_apart = ScaledApart()
        self._scale = scale if owner.config.fp16 else None
        if self._scale is None and (dynamic_loss_scale or static_loss_scale not in (None, 1.0)):
            logger.info("the loss is not scaled: fp16 is not set in the configuration")
        names = {id(each): name for name, each in self._model.named_parameters()}
        self._names = [[_name(names, each) for each in group["params"]] for group in self.param_groups]
        owner.optimizer = self
        if self._model.partitioned:
            self.follow(self._model)

    def follow(self, model: DistributedModel, values: WeakTensorKeyDictionary | None = None) -> None:
        """Step the parameters that the partitioned model has here. All processes call this together.

        values: what those in 16 bits were before they were rounded, by parameter.

        Raises:
            StrategyError: the optimizer does not bear that what it steps is spread over processes.
        """
        owner, own = session(), dict(model.named_parameters())
        for group, names in zip(self.param_groups, self._names, strict=True):
            group["params"][:] = [own[name] for name in names if name in own]
        replicas = owner.mesh.group("data", "zero")
        self.inner = stepping(
            self.optimizer,
            halves=half_of(owner.config) is not None,
            values=values,
            scale=self._scale,
            sharing=replicas if owner.config.shard_optimizer_state and replicas.size() > 1 else None,
            sharded=replicas if owner.config.sharded_data_parallel_degree > 1 else None,
            device=owner.device,
            spread=spread_of(model),
        )
        self._share()

    @property
    def loss_scale(self) -> float:
        """The factor of the loss, and of gradients until they are stepped; 1 but under `fp16`."""
        return 1.0 if self._scale is None else self._scale()

    @property
    def overflow(self) -> bool:
        """True if the last step was skipped, or `update_master_grads` found that the next one has to be."""
        return isinstance(self.inner, ScaledOptimizer) and self.inner.step_was_skipped

    def update_master_grads(self) -> None:
        """Find, with all processes, whether all gradients are finite: `overflow`. `step` does so in any case."""
        self._need_partition("update_master_grads")
        if isinstance(self.inner, ScaledOptimizer):
            self.inner.step_was_skipped = self.inner.overflows()

    def clip_master_grads(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale gradients down where the norm of all of the model's exceeds `max_norm`; returns the norm before.

        The norm is the one that plain training would see, without the loss scale. All processes of a model call it
        together, after a training step.

        Raises:
            ArgumentError: the model is not partitioned yet, or `max_norm` or `norm_type` is not above 0.
        """
        parameters = [each for group in self.param_groups for each in group["params"]]
        norm = clip(self._model, parameters, "clip_master_grads", max_norm, norm_type)
        self.trust_gradients()
        return norm

    def clip_grad_norm(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """`clip_master_grads`, by the name under which Hugging Face's Trainer of transformers 4 looks for it."""
        return self.clip_master_grads(max_norm, norm_type)

    def trust_gradients(self) -> None:
        """Gradients are now as they have to be: what a script changes of them after this is told, once."""
        self._scaled_apart.look(self._model)

    def _need_partition(self, call: str) -> None:
        if not self._model.partitioned:
            raise ArgumentError(f"{call} was called before the first smp.step, which makes gradients; call it after")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Give it one more group, of parameters of the model."""
        known = len(self.inner.param_groups)
        super().add_param_group(param_group)
        for group in self.inner.param_groups[known:]:
            names = {id(each): name for name, each in self._model.named_parameters()}
            self._names.append([_name(names, each) for each in group["params"]])

    def step(self, closure: Any = None) -> Any:
        """One step of the parameters that are here.

        Raises:
            ArgumentError: a closure is given, which could not run the parts of the model on other processes.
        """
        self._refuse(closure)
        self._scaled_apart.tell()
        config = session().config
        if config.sharded_data_parallel_degree > 1 and config.sdp_gradient_clipping:
            self.clip_master_grads(config.sdp_gradient_clipping)
        return self.inner.step()

    def local_state_dict(self, gather_if_shard: bool = True) -> OptimizerState:
        """The state of the parameters that are here, by name, with the key `_smp_is_partial`.

        No communication, but for what replicas share out: then all of these call it together, and each has the whole.

        Args:
            gather_if_shard: accepted: False, which asks for this replica's share alone, gives the whole as well, so
                that one replica's files are the checkpoint, and load where there are more replicas or fewer.

        Raises:
            ArgumentError: some of these did not call it, and are named.
        """
        check_bools("optimizer.local_state_dict", gather_if_shard=gather_if_shard)
        if self._model.partitioned:
            meet_replicas("optimizer.local_state_dict()")
        return self._partial_state()

    def state_dict(self) -> OptimizerState:
        """The state of the whole model's parameters, as the optimizer given would have it, which can load it, too.

        On all processes that hold parts of one replica.

        Raises:
            ArgumentError: some of these did not call it, and are named.
        """
        if not self._model.partitioned:
            return self.inner.state_dict()
        mesh = session().mesh
        if not meet_replicas("optimizer.state_dict()") and mesh.size("pipeline", "tensor") > 1:
            meet("optimizer.state_dict()", mesh.group("pipeline", "tensor"), longest=PATIENCE)
        named = merged(of_all(self._partial_state()), "the optimizer's state")
        order = [name for group in self._names for name in group]
        number = {name: index for index, name in enumerate(order)}
        state = {number[name]: held for name, held in named["state"].items()}
        groups = [
            {**group, "params": [number[name] for name in names]}
            for group, names in zip(named["param_groups"], self._names, strict=True)
        ]
        return {**named, "state": dict(sorted(state.items())), "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take a whole state, or the partial ones of all processes, after the partition, or now where that has been.

        Raises:
            ArgumentError: it is no state of this optimizer's groups.
        """
        given = dict(state_dict)
        if given.get(PARTIAL):
            given = merged(of_all(given), "the optimizer's state")
        named = self._by_name({key: value for key, value in given.items() if key not in MARKS})
        self._model.when_partitioned(lambda: self._load(named))

    def _partial_state(self) -> OptimizerState:
        named = self._named_state()
        return {**named, PARTIAL: True, CUTS: self._model.split.told(named["state"])}

    def _named_state(self) -> OptimizerState:
        """The state that is here, by the names of parameters."""
        own = dict(self._model.named_parameters())
        here = [name for names in self._names for name in names if name in own]
        saved = self.inner.state_dict()
        state = {here[number]: whole_over_shards(held) for number, held in saved["state"].items()}
        groups = [
            {**{key: value for key, value in group.items() if key != "params"}, "params": list(names)}
            for group, names in zip(saved["param_groups"], self._names, strict=True)
        ]
        return {**saved, "state": state, "param_groups": groups}

    def _by_name(self, given: OptimizerState) -> OptimizerState:
        """A state of torch's form, which numbers parameters, by names."""
        groups = given.get("param_groups")
        if not isinstance(groups, list) or "state" not in given or len(groups) != len(self._names):
            raise ArgumentError(
                f"the optimizer was given a state with {shown(list(given))}; give what its state_dict or "
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
        state = {name_of.get(key, key): held for key, held in given["state"].items()}
        return {**given, "state": state}

    def _load(self, named: OptimizerState) -> None:
        own = dict(self._model.named_parameters())
        numbers: dict[str, int] = {}
        groups = []
        for group, names in zip(named["param_groups"], self._names, strict=True):
            mine = [name for name in names if name in own]
            for name in mine:
                numbers[name] = len(numbers)
            groups.append({**group, "params": [numbers[name] for name in mine]})
        split = self._model.split
        state = {
            numbers[name]: shards_like(own[name], _own(split, name, held))
            for name, held in named["state"].items()
            if name in numbers
        }
        self.inner.load_state_dict({**named, "state": state, "param_groups": groups})
        self._share()
        self.optimizer.param_groups = self.param_groups  # a scheduler may have been made of it


def _own(split: TensorSplit, name: str, held: Mapping[str, Any]) -> OptimizerState:
    return {key: split.own(name, value) if isinstance(value, Tensor) else value for key, value in held.items()}


def _name(names: Mapping[int, str], parameter: Tensor) -> str:
    name = names.get(id(parameter))
    if name is None:
        raise ArgumentError(
            f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is not the DistributedModel's; make "
            "it of model.parameters()"
        )
    return name
