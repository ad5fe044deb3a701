"""Jobs whose losses mean different things, trained on several ranks and plainly on the whole batch."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from atorch.runtime.loss.reduction import IGNORED
from atorch.runtime.tensor_parallel import whole_state
from tests.auto.training import accelerate, accelerated_steps, steps
from tests.contract import job
from tests.zoo import Residual, Words

F = nn.functional
VOCAB, SEQ, BATCH, STEPS = 11, 6, 8, 3


class Net(Words):
    """Always the same weights."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        super().__init__(VOCAB, 16, lambda: Residual(nn.Linear(16, 16), nn.Tanh()))


class Causal(nn.Module):
    """Computes its loss itself, as transformers' models do: of labels one place to the left, -100 left out."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, input_ids: Tensor, labels: Tensor, **others: Any) -> dict[str, Tensor]:
        logits = self.net(input_ids)
        return {"loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), "logits": logits}


class Samples(Dataset[dict[str, Tensor]]):
    """Rows with very different numbers of labels; in `full_first` those of the first global batch have all."""

    def __init__(self, num: int = STEPS * BATCH, full_first: bool = False) -> None:
        generator = torch.Generator().manual_seed(7)
        self.tokens = torch.randint(0, VOCAB, (num, SEQ), generator=generator)
        self.labels = self.tokens.clone()
        self.y = torch.randn(num, SEQ, VOCAB, generator=generator)
        self.mask = torch.rand(num, SEQ, generator=generator)
        for row in range(num):
            if not (full_first and row < BATCH):
                self.labels[row, 2 + (row % 2) * 3 :] = IGNORED  # every second row, so that ranks differ
                self.mask[row, 1 + (row % 2) * 4 :] = 0.0

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {
            "input_ids": self.tokens[index],
            "labels": self.labels[index],
            "y": self.y[index],
            "mask": self.mask[index],
        }


def rows(batch: Any, output: Tensor) -> Tensor:
    return F.mse_loss(output, batch["y"])


def added_up(batch: Any, output: Tensor) -> Tensor:
    return F.mse_loss(output, batch["y"], reduction="sum") / 100


def by_label(batch: Any, output: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), batch["labels"].flatten())


def masked(batch: Any, output: Tensor) -> Tensor:
    losses = (output - batch["y"]).square().mean(-1)
    return (losses * batch["mask"]).sum() / batch["mask"].sum()


def by_row(batch: Any, output: Tensor) -> Tensor:
    """A mean over rows of means over their labels."""
    losses = F.cross_entropy(output.transpose(1, 2), batch["labels"], reduction="none")
    return (losses.sum(1) / (batch["labels"] != IGNORED).sum(1)).mean()


def of_the_model(batch: Any, output: Any) -> Tensor:
    return output["loss"]


def in_a_tuple(batch: Any, output: Tensor) -> tuple[Tensor, float]:
    return added_up(batch, output), 1.0


def contrast(batch: Any, output: Tensor) -> Tensor:
    """Every row against all others of the batch."""
    features = F.normalize(output.flatten(1), dim=1)
    return F.cross_entropy(features @ features.T * 5, torch.arange(len(features), device=features.device))


LOSSES: Mapping[str, tuple[Callable[[], nn.Module], Callable[[Any, Any], Any]]] = {
    "rows": (Net, rows),
    "sum": (Net, added_up),
    "labels": (Net, by_label),
    "mask": (Net, masked),
    "by row": (Net, by_row),
    "causal": (Causal, of_the_model),
    "tuple": (Net, in_a_tuple),
}


def value(loss: Any) -> Tensor:
    return loss[0] if isinstance(loss, tuple) else loss


def plain(name: str, data: Samples, batch_size: int = BATCH) -> dict[str, Tensor]:
    """The parameters of plain training on the whole batches."""
    make, loss_func = LOSSES[name]
    model = make()
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    starts = range(0, len(data), batch_size)
    steps(model, optim, loss_func, (batch_of(data, *range(len(data))[start : start + batch_size]) for start in starts))
    return {key: each.detach().clone() for key, each in model.named_parameters()}


def distance(got: Mapping[str, Tensor], name: str, data: Samples, batch_size: int = BATCH) -> float:
    """‖Δp − Δp_plain‖ / ‖Δp_plain‖, over all parameters of `got` together."""
    start = {key: each.detach() for key, each in LOSSES[name][0]().named_parameters()}
    start = {key: start[key] for key in got}  # a stage of a pipeline has its own
    return job.distance(job.updates(start, got), job.updates(start, plain(name, data, batch_size)))


def deviation(
    rank: int, size: int, name: str, strategy: Any, full_first: bool = False, batch_size: int = BATCH, **more: Any
) -> float:
    """How far the updates under a strategy are from plain ones."""
    make, loss_func = LOSSES[name]
    data = Samples(full_first=full_first)
    result = accelerate(make(), strategy, data, loss_func, batch_size, model_input_format="unpack_dict", **more)
    accelerated_steps(result)
    return distance(state_of(result.model), name, data, batch_size)


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """All parameters of a model by name, whatever they are sharded over."""
    state = whole_state(model)
    return {name: state[name].detach().float() for name, _ in model.named_parameters()}


def accelerated(make: Any, loss_func: Any, strategy: Any = ("ddp",), **more: Any) -> Any:
    """The result for a loop of one's own, without a dataset."""
    return accelerate(make(), list(strategy), None, loss_func, **{"model_input_format": "unpack_dict", **more})


def gradient_error(result: Any, make: Any, loss_func: Any, shares: list[Any], rank: int) -> float:
    """How far gradients of ranks that have these shares of a batch are from the whole batch's, relatively."""
    batch = shares[rank]
    value(result.loss_func(batch, result.model(**batch))).backward()
    whole = {key: torch.cat([share[key] for share in shares]) for key in batch}
    plain_model = make()
    value(loss_func(whole, plain_model(**whole))).backward()
    expected = {name: each.grad for name, each in plain_model.named_parameters()}
    errors = [(each.grad - expected[name]).norm() for name, each in result.model.named_parameters()]
    result.optim.zero_grad()
    return float(torch.stack(errors).norm() / torch.stack([g.norm() for g in expected.values()]).norm())


def batch_of(data: Samples, *indices: int) -> dict[str, Tensor]:
    samples = [data[i] for i in indices]
    return {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}
