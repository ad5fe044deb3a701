"""Tests whether an optimizer computes the same if its process has only a part of the parameters.

A sharding method gives each process's optimizer some parameters ("apart"), some rows or columns of each ("rows",
"columns"), or some elements of each ("flat"). DTensors ("sharded") look like full tensors. Element-wise steps,
such as Adam's, are the same under all of them. Steps that use a parameter's norm, statistics of its rows, or all
parameters together are not. No list of classes covers users' optimizers. So the optimizer is tried: a few steps on
small parameters like the given ones, full and split.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer, Rprop

from atorch.distributed.collectives import gather_objects
from atorch.distributed.mesh import forget_shardings
from atorch.logs import logger
from atorch.model.elementwise_optimizers import is_elementwise
from atorch.model.user_functions import MakeOptimizer
from atorch.runtime.optimizer.wrapped_optimizer import WrappedOptimizer, local

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")
ShardKind = Literal["apart", "rows", "columns", "flat", "sharded"]

_STEPS = 5
_DEPENDS: Mapping[ShardKind, str] = {
    "apart": "its step of one parameter depends on the other parameters",
    "rows": "its step of some rows of a parameter depends on the other rows",
    "columns": "its step of some columns of a parameter depends on the other columns",
    "flat": "its step of some elements of a parameter depends on the parameter's other elements, or on its shape",
    "sharded": "its step of a parameter that is spread over processes is another than that of a whole one",
}


def small(groups: Iterable[Any]) -> list[dict[str, Any]]:
    """Groups with the settings of `groups` and small parameters like theirs, two for each number of dimensions."""
    listed = list(groups)
    parts = listed if listed and isinstance(listed[0], dict) else [{"params": listed}]
    small_groups = []
    for part in parts:
        entries = [part["params"]] if isinstance(part["params"], Tensor) else list(part["params"])
        kinds: dict[Any, Any] = {}
        for entry in entries:
            tensor = tensor_of(entry)
            if tensor.requires_grad and tensor.is_floating_point():
                kinds.setdefault(tensor.dim(), entry)
        copies: list[Any] = []
        for entry in kinds.values():
            tensor = tensor_of(entry)
            for copied in range(2):
                shape = [min(size, 6 - 2 * copied + 2 * (dim % 2)) for dim, size in enumerate(tensor.shape)]
                value = nn.Parameter(torch.zeros(shape, dtype=torch.float64, device=_place(tensor)))
                copies.append(
                    (f"{entry[0]}.{copied}" if copied else entry[0], value) if isinstance(entry, tuple) else value
                )
        small_groups.append({**{k: v for k, v in part.items() if k != "params"}, "params": copies})
    return [part for part in small_groups if part["params"]]


def makes_elementwise(make_optimizer: MakeOptimizer, groups: Iterable[Any]) -> bool:
    """True if `make_optimizer` makes an element-wise optimizer for such groups, or a wrapper of one."""
    optimizer = made_small(make_optimizer, groups)
    while isinstance(optimizer, WrappedOptimizer):
        optimizer = optimizer.inner
    return optimizer is not None and is_elementwise(optimizer)


def needs_closure(optimizer: Any) -> bool:
    """True if the optimizer's step requires a closure."""
    try:
        closure = inspect.signature(optimizer.step).parameters.get("closure")
    except (TypeError, ValueError):
        return False
    return closure is not None and closure.default is inspect.Parameter.empty


def made_small(make_optimizer: MakeOptimizer, groups: Iterable[Any]) -> Optimizer | None:
    """The optimizer on small parameters; None if it cannot be made for them."""
    made, error = _attempt(lambda: make_optimizer(small(groups)))
    if error is not None:
        logger.info("the optimizer cannot be tried on small parameters: %s", error)
    return made


def _attempt(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return work(), None
    except Exception as error:  # a user's optimizer may raise anything
        return None, error


def difference(
    make_optimizer: MakeOptimizer, groups: Iterable[Any], split: ShardKind, group: dist.ProcessGroup | None = None
) -> str | None:
    """The reason why the optimizer does not support `split`; None if it computes the same, or cannot be tried.

    group: for "sharded", the processes, all of which must call this.
    """
    few = small(groups)
    optimizer = made_small(make_optimizer, few)
    if optimizer is None or (is_elementwise(optimizer) and not (split == "sharded" and type(optimizer) is Rprop)):
        return None  # torch's Rprop is not the same on DTensors
    if split != "sharded" and needs_closure(optimizer):
        return "it evaluates the loss again while it steps, and takes all parameters together"
    with torch.random.fork_rng(devices=[]):
        for dtype, is_sparse in itertools.product((torch.float64, torch.float32), (False, True)):
            trial = _Trial(make_optimizer, few, dtype, is_sparse)
            expected, error = _attempt(partial(trial.updates, _all_of))
            if expected is None:
                logger.info("%s cannot be tried on small parameters: %s", type(optimizer).__name__, error)
                continue
            return _compared(trial, split, group, expected)
    return None


OptimizerView = Callable[[int, Tensor], "Tensor | None"]  # one optimizer's part of the parameter with an index


def _compared(trial: _Trial, split: ShardKind, group: dist.ProcessGroup | None, expected: list[Any]) -> str | None:
    views: list[OptimizerView] = [partial(_cut, split, number) for number in range(2)]
    if split == "sharded":
        assert group is not None
        views = [partial(_shard, _mesh(group, expected[0].device))]
    sums = torch.zeros(2, dtype=torch.float64)
    for view in views:
        got, error = _attempt(partial(trial.updates, view))
        if got is None:
            text = str(error).strip().split("\n")[0].split(". ")[0]
            return f"it cannot step on them ({type(error).__name__}: {text[:120]})"
        for index, update in enumerate(got):
            if update is not None:
                expected_part = view(index, expected[index])
                assert expected_part is not None
                sums[0] += (local(update).double() - local(expected_part).double()).square().sum().cpu()
                sums[1] += local(expected_part).double().square().sum().cpu()
    if split == "sharded":
        forget_shardings()  # else tensors on another mesh of this shape would use this mesh's group
        shares = gather_objects(sums.tolist(), group)
        sums = torch.tensor(shares, dtype=torch.float64).sum(0)
    # An optimizer that computes in 16 bits inside (Muon) rounds sums of parts differently.
    tolerance = 2e-2 if split == "sharded" else 1e-5
    return _DEPENDS[split] if float(sums[0]) > tolerance**2 * float(sums[1]) else None


class _Trial:
    """A few steps from fixed values with fixed gradients, by optimizers that get parts of them."""

    def __init__(
        self, make_optimizer: MakeOptimizer, few: list[dict[str, Any]], dtype: torch.dtype, is_sparse: bool
    ) -> None:
        self._make, self._groups, self._is_sparse = make_optimizer, few, is_sparse
        self._largest: float | None = None  # learning rate
        shapes = [(tensor.shape, tensor.device) for tensor in _tensors(few)]
        generator = torch.Generator().manual_seed(3)

        def drawn() -> list[Tensor]:
            return [torch.randn(shape, generator=generator).to(place, dtype) for shape, place in shapes]

        self._values = drawn()
        self._gradients = [[grad * (1 + 2 * number) for number, grad in enumerate(drawn())] for _ in range(_STEPS)]

    def updates(self, view: OptimizerView) -> list[Any]:
        """The total update of each parameter's part in `view`; None for parameters without one."""
        torch.manual_seed(5)
        parameters, groups = self._parameters(view)
        optimizer = self._make(groups)
        if self._largest is None:  # in the first trial, which is on full parameters
            self._largest = max(
                (abs(float(part["lr"])) for part in optimizer.param_groups if "lr" in part), default=0.0
            )
        for part in optimizer.param_groups:  # scaled, since updates must exceed the rounding of parameters
            if isinstance(part.get("lr"), float):
                part["lr"] *= 0.1 / self._largest if self._largest else 1.0
        before = {index: parameter.detach().clone() for index, parameter in parameters.items()}
        for gradients in self._gradients:
            gradient_parts = {index: view(index, gradients[index]) for index in parameters}
            if needs_closure(optimizer):
                closure: Any = partial(_evaluate, parameters, gradient_parts)
                optimizer.step(closure)
                continue
            for index, parameter in parameters.items():
                gradient = gradient_parts[index]
                assert gradient is not None
                parameter.grad = gradient.to_sparse(1) if self._is_sparse and gradient.dim() else gradient.clone()
            optimizer.step()
        return [parameters[i].detach() - before[i] if i in parameters else None for i in range(len(self._values))]

    def _parameters(self, view: OptimizerView) -> tuple[dict[int, nn.Parameter], list[dict[str, Any]]]:
        parameters: dict[int, nn.Parameter] = {}
        groups, index = [], 0
        for part in self._groups:
            entries: list[Any] = []
            for entry in part["params"]:
                value = view(index, self._values[index])
                if value is not None:
                    parameters[index] = nn.Parameter(value.clone())
                    entries.append((entry[0], parameters[index]) if isinstance(entry, tuple) else parameters[index])
                index += 1
            groups.append({**part, "params": entries})
        return parameters, [part for part in groups if part["params"]]


def _evaluate(parameters: dict[int, nn.Parameter], targets: Mapping[int, Any]) -> Tensor:
    """Evaluate, as a closure, a loss with many minima, and its gradients; other steps lead to other minima."""
    losses = []
    for index, parameter in parameters.items():
        distance = 3.0 * (parameter.detach() - targets[index])
        parameter.grad = distance.sin()
        losses.append(_whole((1.0 - distance.cos()).sum()) / 3.0)
    return torch.stack(losses).sum()


def _all_of(index: int, tensor: Tensor) -> Tensor:
    return tensor


def _cut(split: ShardKind, number: int, index: int, tensor: Tensor) -> Tensor | None:
    """The part of a tensor for optimizer `number` of two."""
    if split == "apart":
        return tensor if index % 2 == number else None
    dim = 1 if split == "columns" else 0
    tensor = tensor.flatten() if split == "flat" else tensor
    if tensor.dim() <= dim or tensor.shape[dim] < 2:
        return tensor if number == 0 else None
    return tensor.tensor_split(2, dim)[number]


def _mesh(group: dist.ProcessGroup, device: torch.device) -> DeviceMesh:
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh.from_group(group, device.type)


def _shard(mesh: DeviceMesh, index: int, tensor: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor, Replicate, Shard

    if tensor.dim() == 0:  # fsdp keeps it as a plain tensor
        return tensor
    whole = DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)
    return whole.redistribute(mesh, [Shard(0)])


def _whole(tensor: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _place(tensor: Tensor) -> torch.device:
    return torch.device("cpu") if tensor.is_meta else tensor.device


def _tensors(groups: Iterable[dict[str, Any]]) -> list[Tensor]:
    return [tensor_of(entry) for part in groups for entry in part["params"]]


def tensor_of(entry: Any) -> Tensor:
    """The tensor of a group's entry, which may be a pair of name and parameter."""
    tensor: Tensor = entry[1] if isinstance(entry, tuple) else entry
    return tensor
