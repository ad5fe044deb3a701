"""Models trained split and whole, side by side."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from atorch.runtime.sequence_parallel import TokenPartition, Ulysses, split_stream
from tests.runtime.tensor_parallel.models import SIZES, VOCAB, loss_of, make

STEPS = 3
TOKENS = 8


class Collectives(TorchDispatchMode):
    """Counts collectives by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.counts[func._opname] = self.counts.get(func._opname, 0) + 1
        return func(*args, **(kwargs or {}))


def batch(name: str, step: int = 0, image: int = 12) -> dict[str, Tensor]:
    """The inputs of a step, the same on every rank. BERT's are padded."""
    generator = torch.Generator().manual_seed(100 + step)
    if name == "vit":
        return {"pixel_values": torch.randn(3, 3, image, image, generator=generator)}
    ids = torch.randint(0, VOCAB, (3, TOKENS), generator=generator)
    if name == "t5":
        return {"input_ids": ids, "decoder_input_ids": ids.flip(1)}
    if name == "bert":
        mask = torch.ones_like(ids)
        mask[1, -3:] = 0
        return {"input_ids": ids, "attention_mask": mask}
    return {"input_ids": ids}


def vit(image: int = 12) -> nn.Module:
    """Of nine patches, or another number, and one token more."""
    torch.manual_seed(3)
    sizes = {name: size for name, size in SIZES.items() if name != "vocab_size"}
    config = transformers.ViTConfig(
        **sizes, image_size=image, patch_size=4, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    return transformers.ViTForImageClassification(config)


def made(name: str, **settings: Any) -> nn.Module:
    return vit(**settings).train() if name == "vit" else make(name, **settings)


def ulysses(model: nn.Module, run: Callable[[nn.Module], Any], group: dist.ProcessGroup) -> Any:
    return split_stream(model, run, TokenPartition(group), Ulysses(group))


def average(model: nn.Module) -> None:
    """What every data-parallel method does."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


def train(model: nn.Module, name: str, *, averages: bool) -> list[float]:
    optim = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    losses = []
    for step in range(STEPS):
        loss = loss_of(model(**batch(name, step)))
        loss.backward()
        if averages:
            average(model)
        optim.step()
        optim.zero_grad()
        losses.append(loss.item())
    return losses


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def distance(got: dict[str, Tensor], expected: dict[str, Tensor], before: dict[str, Tensor]) -> float:
    """‖Δp − Δp_ref‖ / ‖Δp_ref‖ over all parameters together."""
    assert got.keys() == expected.keys()
    error = torch.stack([(got[name] - expected[name]).double().norm() for name in got]).norm()
    return float(error / torch.stack([(expected[name] - before[name]).double().norm() for name in got]).norm())


def parity(rank: int, size: int, name: str, settings: dict[str, Any], prepare: Any = None) -> dict[str, Any]:
    """A model split over all ranks beside the same one whole."""
    model = made(name, **settings)
    plain = copy.deepcopy(model)
    before = state(plain)
    streams = ulysses(model, lambda model: model(**batch(name)), dist.group.WORLD)
    if prepare is not None:
        prepare(model)
    tokens: list[int] = []
    last = model.get_submodule(list(streams)[-1])
    handle = last.register_forward_pre_hook(lambda _, args: tokens.append(args[0].shape[1]))
    with Collectives() as forward:
        loss = loss_of(model(**batch(name)))
    handle.remove()
    with Collectives() as backward:
        loss.backward()
    model.zero_grad()
    losses, expected = train(model, name, averages=True), train(plain, name, averages=False)
    return {
        "training": all(module.training for module in model.modules()),
        "loss": max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True)),
        "update": distance(state(model), state(plain), before),
        "tokens": tokens,
        "forward": forward.counts,
        "backward": backward.counts,
        "streams": {path: (dict(each.arguments), dict(each.outputs)) for path, each in streams.items()},
    }
