"""Models trained split and whole, side by side."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from atorch.runtime.sequence_parallel import TokenPartition, Ulysses, split_stream
from tests.runtime.tensor_parallel.models import VOCAB, Collectives, loss_of, make, side_by_side, vit

TOKENS = 8


class Block(nn.Module):
    """Attention of four heads by torch's operation; some kinds look at other tokens beside it."""

    def __init__(self, kind: str = "plain", width: int = 8) -> None:
        super().__init__()
        self.kind = kind
        self.norm, self.project, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mix = nn.Conv1d(width, width, 3, padding=1) if kind == "convolution" else nn.Identity()
        self.drop = nn.Dropout(0.5 if kind == "dropout" else 0.0)
        self.biases = nn.Parameter(torch.zeros(12, 12)) if kind == "learnt" else None

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.mix(x.transpose(1, 2)).transpose(1, 2)
        query, key, value = self.project(self.norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        if self.kind == "learnt":
            mask = self.biases
        elif self.kind == "own mask":
            mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu()
        elif self.kind == "mixing":
            value = value.cumsum(-2)
        if self.kind == "written out":
            mixed = (query @ key.transpose(-2, -1)).softmax(-1) @ value
        else:
            mixed = F.scaled_dot_product_attention(query, key, value, mask, is_causal=self.kind == "causal")
        return x + self.drop(self.out(mixed.transpose(1, 2).flatten(2)))


class Stack(nn.Module):
    """Blocks one after the other, and their last input given out where asked for; the same block twice where asked."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.blocks = nn.ModuleList(Block(kind) for _ in range(2))
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        between = x
        for block in (*self.blocks, *self.blocks) if self.kind == "twice" else self.blocks:
            between, x = x, block(x, mask)
        return (self.head(x), between) if self.kind == "inner outputs" else self.head(x)


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


def made(name: str, **settings: Any) -> nn.Module:
    """A model of a family; a ViT of nine patches, or of another image's, and one token more."""
    torch.manual_seed(3)
    return vit(**{"image": 12, **settings}).train() if name == "vit" else make(name, **settings)


def ulysses(model: nn.Module, run: Callable[[nn.Module], Any], group: dist.ProcessGroup) -> Any:
    return split_stream(model, run, TokenPartition(group), Ulysses(group))


def average(model: nn.Module) -> None:
    """What every data-parallel method does."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


def parity(rank: int, size: int, name: str, settings: dict[str, Any], prepare: Any = None) -> dict[str, Any]:
    """A model split over all ranks beside the same one whole."""
    model = made(name, **settings)
    plain = copy.deepcopy(model)
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
    return {
        "training": all(module.training for module in model.modules()),
        **side_by_side(model, plain, lambda model, step: loss_of(model(**batch(name, step))), reduce=average),
        "tokens": tokens,
        "forward": forward.counts,
        "backward": backward.counts,
        "streams": {path: (dict(each.arguments), dict(each.outputs)) for path, each in streams.items()},
    }
