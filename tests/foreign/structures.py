"""Training scripts of structures that public reports are about, each a model and a loop: what a loop saw, step by step.

Losses of two processes, each weighted, are plain training's on one process: what a model or a loss looks at beyond its
own samples it gathers over processes, as the originals do.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.foreign import structure_loops as loops
from tests.foreign import structure_models as models
from tests.foreign.script import Arguments, Samples, Step, Training, drawn


class Structure(NamedTuple):
    """What makes the arguments of auto_accelerate, and the loop."""

    make: Callable[[], Arguments]
    loop: Callable[[Training], list[Step]] = loops.loop


def _row(index: int) -> tuple[Tensor, Tensor]:
    return torch.randn(5, generator=drawn(index)), torch.tensor(index % 3)


def _text(index: int) -> tuple[Tensor, Tensor]:
    words = torch.randint(0, models.WORDS, (2, models.TOKENS), generator=drawn(index))
    return words[0], words[1]


def _classes(batch: Any, output: Any) -> Tensor:
    return F.cross_entropy(output, batch[1])


def _of(
    model: Callable[[], nn.Module], loss: Callable[[Any, Any], Any] = _classes, **more: Any
) -> Callable[[], Arguments]:
    def make() -> Arguments:
        torch.manual_seed(3)
        return {
            "model": model(),
            "optim_func": torch.optim.SGD,
            "optim_args": {"lr": 0.1, "momentum": 0.9},
            "dataset": Samples(models.ROWS, _row),
            "loss_func": loss,
            "model_input_format": "unpack_sequence",
            "dataloader_args": {"batch_size": models.BATCH},
            **more,
        }

    return make


def _document(index: int) -> Tensor:
    return torch.randint(0, models.WORDS, (3 + index % 5,), generator=drawn(index))


def _packed(documents: Sequence[Tensor]) -> dict[str, Tensor]:
    labels = [torch.cat([torch.tensor([models.IGNORED]), each[1:]]) for each in documents]
    positions = [torch.arange(len(each)) for each in documents]
    rows = {"input_ids": list(documents), "labels": labels, "position_ids": positions}
    return {name: torch.cat(parts)[None] for name, parts in rows.items()}


def _counting() -> Arguments:
    """Only the loop knows that it counts over all processes."""
    return _of(models.Counting, models.own_loss, **({"loss_weight": "sum"} if models.several() else {}))()


_WORDS: Mapping[str, Any] = {"dataset": Samples(models.ROWS, _text)}

STRUCTURES: Mapping[str, Structure] = {
    "dpo": Structure(_of(models.Preferring, models.preference, optim_param_func=models.trainable, **_WORDS)),
    "grpo": Structure(_of(models.Language, models.policy, **_WORDS), loops.generates),
    "sam": Structure(_of(models.Net), loops.sharpens),
    "pcgrad": Structure(_of(models.TwoHeads, models.both), loops.projects),
    "clip": Structure(_of(models.TwoTowers, models.contrast)),
    "vq": Structure(_of(models.Codebook)),
    "swav": Structure(_of(models.Prototypes, models.swapped), loops.normalizes_prototypes),
    "meanflow": Structure(_of(models.Flow)),
    "act": Structure(_of(models.Pondering)),
    "dp_sgd": Structure(_of(models.Net), loops.per_sample),
    "schedule_free": Structure(
        _of(models.Net, optim_func=loops.ScheduleFree, optim_args={"lr": 0.1}), loops.schedules_free
    ),
    "lisa": Structure(_of(models.Net), loops.trains_few_layers),
    "relora": Structure(
        _of(models.Adapters, optim_param_func=lambda model: list(model.parameters())), loops.merges_adapters
    ),
    "qat": Structure(_of(models.Quantized)),
    "forces": Structure(_of(models.Forces)),
    "packing": Structure(
        _of(models.Documents, models.of_labels, dataset=Samples(models.ROWS, _document),
            dataloader_args={"batch_size": models.BATCH, "collate_fn": _packed}, model_input_format="unpack_dict"),
        loops.weighs_labels,
    ),
    "experts": Structure(_of(models.Mixture)),
    "ema": Structure(_of(models.Teaching, models.follows_teacher), loops.follows),
    "optimizer_in_backward": Structure(_of(models.Net, optim_args={"lr": 0.1}), loops.steps_in_backward),
    "experts_in_backward": Structure(_of(models.Mixture, optim_args={"lr": 0.1}), loops.steps_in_backward),
    "steps_in_hooks": Structure(_of(models.Net), loops.steps_in_hooks),
    "clamps_in_hooks": Structure(_of(models.Net), loops.clamps_in_hooks),
    "centralizes": Structure(_of(models.Net), loops.centralizes),
    "counted_layers": Structure(_of(models.CountedLayers)),
    "num_items": Structure(_counting, loops.counts_items),
    "python_random": Structure(_of(models.Chances), loops.draws),
}  # fmt: skip
