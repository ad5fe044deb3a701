"""The optimizer of a model that is spread over processes: `smp.DistributedOptimizer`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from atorch.distributed.collectives import meet
from atorch.errors import ArgumentError, shown
from atorch.runtime.clip import Key
from atorch.runtime.spread import Spread
from atorch.runtime.wrapped_optimizer import WrappedOptimizer
from atorch.smp.model import DistributedModel
from atorch.smp.optimizers.fused import Fused
from atorch.smp.partial_states import CUTS, MARKS, PARTIAL, merged
from atorch.smp.session import session
from atorch.smp.states import PATIENCE, of_all
from atorch.smp.tensor_split import TensorSplit

if TYPE_CHECKING:
    pass

State = dict[str, Any]


class DistributedOptimizer(WrappedOptimizer):
    """An optimizer that steps the parameters of this process's part of the model, once that is known.

    Its states are known by the names of parameters: of one process's part, or of the whole model, whatever the number
    of processes. Learning-rate schedulers take it for the optimizer that it is given.

    Args:
        optimizer: any of torch's kind, over parameters of the `DistributedModel`.

    Raises:
        ArgumentError: it is none, or has parameters that are not the model's.
    """

    def __init__(self, optimizer: Optimizer) -> None:
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
        super().__init__(optimizer)
        self._model = owner.model
        names = {id(each): name for name, each in self._model.named_parameters()}
        self._names = [[_name(names, each) for each in group["params"]] for group in self.param_groups]
        owner.optimizer = self
        if self._model.partitioned:
            self.follow(self._model)

    def follow(self, model: DistributedModel) -> None:
        """Step the parameters that the partitioned model has here."""
        own = dict(model.named_parameters())
        for group, names in zip(self.param_groups, self._names, strict=True):
            group["params"][:] = [own[name] for name in names if name in own]
        if isinstance(self.inner, Fused):
            self.inner.spread = _spread(model)

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
        return self.inner.step()

    def local_state_dict(self) -> State:
        """The state of the parameters that are here, by name, with the key `_smp_is_partial`. No communication."""
        named = self._named_state()
        return {**named, PARTIAL: True, CUTS: self._model.split.told(named["state"])}

    def state_dict(self) -> State:
        """The state of the whole model's parameters, as the optimizer given would have it, which can load it, too.

        On all processes that hold parts of one replica.

        Raises:
            ArgumentError: some of these did not call it, and are named.
        """
        if not self._model.partitioned:
            return self.inner.state_dict()
        mesh = session().mesh
        if mesh.size("pipeline", "tensor") > 1:
            meet("optimizer.state_dict()", mesh.group("pipeline", "tensor"), longest=PATIENCE)
        named = merged(of_all(self.local_state_dict()), "the optimizer's state")
        order = [name for group in self._names for name in group]
        number = {name: index for index, name in enumerate(order)}
        state = {number[name]: held for name, held in named["state"].items()}
        groups = [
            {**group, "params": [number[name] for name in names]}
            for group, names in zip(named["param_groups"], self._names, strict=True)
        ]
        return {"state": dict(sorted(state.items())), "param_groups": groups}

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

    def _named_state(self) -> State:
        """What is here, by the names of parameters."""
        own = {id(each): name for name, each in self._model.named_parameters()}
        state = {own[id(each)]: dict(held) for each, held in self.state.items() if id(each) in own}
        groups = [
            {**{key: value for key, value in group.items() if key != "params"}, "params": list(names)}
            for group, names in zip(self.param_groups, self._names, strict=True)
        ]
        return {"state": state, "param_groups": groups}

    def _by_name(self, given: State) -> State:
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

    def _load(self, named: State) -> None:
        own = dict(self._model.named_parameters())
        numbers: dict[str, int] = {}
        groups = []
        for group, names in zip(named["param_groups"], self._names, strict=True):
            mine = [name for name in names if name in own]
            for name in mine:
                numbers[name] = len(numbers)
            groups.append({**group, "params": [numbers[name] for name in mine]})
        split = self._model.split
        state = {numbers[name]: _own(split, name, held) for name, held in named["state"].items() if name in numbers}
        self.inner.load_state_dict({"state": state, "param_groups": groups})
        self._share()


def _own(split: TensorSplit, name: str, held: Mapping[str, Any]) -> State:
    return {key: split.own(name, value) if isinstance(value, Tensor) else value for key, value in held.items()}


def _spread(model: DistributedModel) -> Spread:
    """What other processes have of a partitioned model: other stages, and other parts of what tensor ranks split."""
    runner, split = model.runner, model.split
    own = dict(model.named_parameters(remove_duplicate=False))
    parts: dict[Tensor, Key] = {}
    if split.group is not None:
        parts = {own[name]: (split.group,) for name in split.cuts if name in own}
    if runner is None or runner.ties is None:
        return Spread(parts=parts)
    stages = (session().mesh.group("pipeline"),)
    return Spread(over=stages, parts=parts, counted_elsewhere=runner.ties.counted_elsewhere)


def _name(names: Mapping[int, str], parameter: Tensor) -> str:
    name = names.get(id(parameter))
    if name is None:
        raise ArgumentError(
            f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is not the DistributedModel's; make "
            "it of model.parameters()"
        )
    return name
