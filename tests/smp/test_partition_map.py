"""A stage of a pipeline checkpoints runs of its own layers, and trains as the whole model does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import atorch.smp as smp
from atorch import auto_accelerate
from atorch.runtime.pipeline.stage import STAGE, stage_of
from atorch.runtime.tensor_parallel import whole_state
from atorch.smp.partition_map import partition_of, tell_places
from tests.pool import Pool

WIDTH, ROWS, MICRO = 6, 8, 2


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.recomputes = 0

    def forward(self, x: Tensor) -> Tensor:
        self.recomputes += torch._C._current_graph_task_id() != -1  # in a backward pass
        return x + torch.tanh(self.inner(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed = nn.Linear(3, WIDTH)
        self.layers = nn.Sequential(*(Layer() for _ in range(6)))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(x)))


class Rows(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.randn(3, generator=torch.Generator().manual_seed(index))}


def loss_of(batch: Any, output: Any) -> Tensor:
    return output.square().mean()


def trained(rank: int, size: int, strategy: str | None) -> Any:
    """The largest distance from plain training, the partitions of the layers, and which of them ran again."""
    plain = Net()
    rows = torch.stack([Rows()[index]["x"] for index in range(ROWS)])
    plain(rows).square().mean().backward()
    torch.optim.SGD(plain.parameters(), lr=1.0).step()

    model = Net()
    smp.init({"partitions": 2})
    if strategy is not None:
        smp.set_activation_checkpointing(model.layers, strategy=strategy)
    ok, result, _ = auto_accelerate(
        model, lambda parameters, **_: torch.optim.SGD(parameters, lr=1.0), Rows(), loss_of,
        load_strategy=[("parallel_mode", ([("pipeline", 2)], None)), ("pipeline_parallel", {"micro_batches": MICRO})],
        dataloader_args={"batch_size": ROWS}, model_input_format="unpack_dict",
    )  # fmt: skip
    assert ok
    part = result.model.module
    stage = stage_of(part)
    border = stage.start if rank else stage.stop
    calls = [call.unit for call in stage.route.calls]
    places = {name: int(calls.index(name) >= border) for name in calls if STAGE in vars(part.get_submodule(name))}
    assert partition_of(part.layers[0]) is None
    tell_places(part, places)
    for batch in result.dataloader:
        loss = result.loss_func(batch, result.model(**batch))
        loss.backward()
        result.optim.step()
    state = whole_state(result.model)
    smp.shutdown()
    far = max(float((state[name] - each).abs().max()) for name, each in plain.state_dict().items()) if state else 0.0
    return far, [partition_of(layer) for layer in part.layers], [layer.recomputes for layer in part.layers]


@pytest.mark.parametrize(
    "strategy", ["contiguous", *(pytest.param(each, marks=pytest.mark.nightly) for each in (None, "each", "group_2"))]
)
def test_stages_train_as_the_whole(pool: Pool, strategy: str | None) -> None:
    results = pool.run(trained, strategy)
    for rank, (far, places, recomputes) in enumerate(results):
        assert far <= 1e-6
        assert set(places) == {0, 1}
        mine = [place == rank for place in places]
        again = 0 if strategy is None else MICRO
        assert recomputes == [again if here else 0 for here in mine]
