"""Parameters and buffers that lie in memory in unusual ways train as they do in plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map
from torch.utils.data import TensorDataset

from atorch import clip_grad_norm
from atorch.distributed.collectives import gather_objects
from tests.auto.training import accelerate, accelerated_steps, run_each, steps
from tests.pool import Pool

WIDTH, BATCH = 8, 4
METHODS = ("ddp", "zero1", "fsdp", "chunk")


class Net(nn.Module):
    """Two layers and what a case adds to them."""

    def __init__(self, change: Callable[[Net], None]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.after: Callable[[Net, Tensor], Tensor] = lambda model, x: x
        change(self)

    def forward(self, x: Tensor, expected: Tensor) -> Tensor:
        return F.mse_loss(self.after(self, self.second(torch.relu(self.first(x)))), expected)


def expanded_buffer(model: Net) -> None:
    model.register_buffer("mask", torch.linspace(0, 1, WIDTH).expand(4, WIDTH))
    model.after = lambda model, x: x * model.mask[0]


def expanded_parameter(model: Net) -> None:
    model.factor = nn.Parameter(torch.ones(1, WIDTH).expand(4, WIDTH))
    model.after = lambda model, x: x * model.factor[0]


def empty_parameter(model: Net) -> None:
    model.none = nn.Parameter(torch.zeros(0, WIDTH))
    model.after = lambda model, x: x + model.none.sum()


def transposed_parameter(model: Net) -> None:
    model.second.weight = nn.Parameter(model.second.weight.detach().t())


def dict_of_parameters(model: Net) -> None:
    model.terms = nn.ParameterDict({"rows": torch.randn(64, WIDTH), "factor": torch.ones(WIDTH)})
    model.after = lambda model, x: x * model.terms["factor"] + model.terms["rows"].mean(0)


def sparse_buffer(model: Net) -> None:
    model.register_buffer("edges", torch.linspace(0, 1, WIDTH).diag().to_sparse())
    model.after = lambda model, x: (model.edges @ x.t()).t()


CASES: Mapping[str, Callable[[Net], None]] = {
    each.__name__: each
    for each in (
        *(expanded_buffer, expanded_parameter, empty_parameter, transposed_parameter, dict_of_parameters),
        sparse_buffer,
    )
}


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(*torch.randn(2, 4 * BATCH, WIDTH, generator=generator))


def loss_of(batch: Any, loss: Tensor) -> Tensor:
    return loss


def losses(rank: int, size: int, model: Net, method: str) -> list[float]:
    """The whole batch's losses over one epoch."""
    result = accelerate(copy.deepcopy(model), [method], data(), loss_of, BATCH, model_input_format="unpack_sequence")
    return [sum(gather_objects(float(result.step(batch)))) / size for batch in result.dataloader]


def all_losses(rank: int, size: int, case: str) -> list[list[float]]:
    torch.manual_seed(0)
    model = Net(CASES[case])
    return [losses(rank, size, model, method) for method in METHODS]


def plainly(case: str) -> list[float]:
    torch.manual_seed(0)
    model = Net(CASES[case])
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()  # torch's own optimizers refuse expanded ones
    batches = torch.utils.data.DataLoader(data(), batch_size=BATCH)
    return steps(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_of, batches)[0]


@pytest.mark.slow
def test_what_lies_in_memory_in_unusual_ways_trains_as_plainly(pool: Pool) -> None:
    for case, (first, _) in zip(CASES, run_each(pool, all_losses, [(case,) for case in CASES]), strict=True):
        expected = plainly(case)
        for method, found in zip(METHODS, first, strict=True):
            assert found == pytest.approx(expected, rel=1e-5), (case, method)

    alone = adapter_losses(0, 1)["ddp"]
    for each in pool.run(adapter_losses):
        assert each == {"ddp": pytest.approx(alone, rel=1e-5), "zero1": pytest.approx(alone, rel=1e-5)}


class Scaled(Tensor):
    """A weight of whole numbers and a scale, as quantized ones are."""

    @staticmethod
    def __new__(cls, whole: Tensor, scale: Tensor) -> Scaled:
        return Tensor._make_wrapper_subclass(cls, whole.shape, dtype=torch.float32)

    def __init__(self, whole: Tensor, scale: Tensor) -> None:
        self.whole, self.scale = whole, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["whole", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: None, size: Any, stride: Any) -> Scaled:
        return Scaled(**inner)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            return cls(func(args[0].whole), func(args[0].scale))
        if func is torch.ops.aten.view.default:
            raise NotImplementedError("view")
        args = tree_map(lambda each: each.whole * each.scale if isinstance(each, Scaled) else each, args)
        return func(*args, **(kwargs or {}))


def adapter_losses(rank: int, size: int) -> dict[str, list[float]]:
    """Of a trained layer beside a quantized one and a ragged buffer, which differ between processes at first."""
    found = {}
    for method in ("ddp", "zero1"):
        torch.manual_seed(0)
        model = Net(lambda model: None)
        whole = torch.randint(1, 9, (WIDTH, WIDTH), dtype=torch.int8) + rank
        model.first.weight = nn.Parameter(Scaled(whole, torch.tensor(0.05 + rank)), requires_grad=False)
        rows = [torch.linspace(0, 1 + rank, each * WIDTH).view(each, WIDTH) for each in (1, 2)]
        model.register_buffer("rows", torch.nested.nested_tensor(rows, layout=torch.jagged))
        model.after = lambda model, x: x * model.rows.unbind()[1][0]
        found[method] = losses(rank, size, model, method)
    return found


def complex_parameter(model: Net) -> None:
    model.factor = nn.Parameter(torch.linspace(0.1, 1, WIDTH) * (1 + 0.5j))
    model.after = lambda model, x: (x * model.factor).abs()


def grown_buffers(model: Net) -> None:
    model.register_buffer("least", torch.tensor([]))
    model.register_buffer("factor", torch.ones(1))

    def after(model: Net, x: Tensor) -> Tensor:
        if not model.least.numel():
            model.least.resize_(WIDTH)
            model.factor.resize_(WIDTH).fill_(0.5)
        model.least.copy_(x.detach().amin(0))
        return x * model.factor

    model.after = after


@pytest.mark.parametrize("change", [complex_parameter, grown_buffers])
@pytest.mark.parametrize("given", [
    {"load_strategy": [("checkpoint", (nn.Linear,))]}, {"load_strategy": ["zero1"]},
    {"load_strategy": [("micro_batch", {"count": 2})]}, {"load_strategy": ["offload"]},
    {"time_limit": 2, "calibration": False, "precision": "fp32", "excluded": ["compile"]},
])  # fmt: skip
def test_what_grows_and_what_is_complex_train_as_in_plain_pytorch(change: Any, given: dict[str, Any]) -> None:
    given = dict(given)
    model, inputs = Net(change), [torch.randn(2 * BATCH, WIDTH) for _ in range(2)]
    plain = copy.deepcopy(model)
    optimizer, batches = (
        torch.optim.SGD(plain.parameters(), lr=0.1),
        zip(*(x.split(BATCH) for x in inputs), strict=True),
    )
    _, norms = steps(
        plain, optimizer, loss_of, batches, lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    )
    strategy = given.pop("load_strategy", None)
    sequences = {"model_input_format": "unpack_sequence", **given}
    result = accelerate(model, strategy, TensorDataset(*inputs), loss_of, BATCH, **sequences)
    _, found = accelerated_steps(result, lambda model: clip_grad_norm(model, 0.1))
    assert found == pytest.approx(norms, rel=1e-4)
    for one, other in zip(result.model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.detach(), other.detach())
