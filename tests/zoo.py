"""Small models of plain torch that several tests train; those of Hugging Face are in `tests.language_models`."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Residual(nn.Module):
    """A block of the layers that it is given."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.branch = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x)


class Labelled(nn.Sequential):
    """Layers of a model that takes the label beside the sample, as `unpack_sequence` gives it."""

    def forward(self, x: Tensor, *label: Tensor) -> Tensor:
        return super().forward(x)  # type: ignore[no-any-return]


class Words(nn.Sequential):
    """An embedding, layers, and a head that gives logits of each word; whatever else a batch has is left alone."""

    def __init__(self, words: int, width: int, layer: Callable[[], nn.Module], num_layers: int = 2) -> None:
        layers = nn.Sequential(*(layer() for _ in range(num_layers)))
        super().__init__(OrderedDict(embed=nn.Embedding(words, width), layers=layers, head=nn.Linear(width, words)))

    def forward(self, input_ids: Tensor, **_: Any) -> Tensor:
        return super().forward(input_ids)  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """A block whose attention is torch's or written out, with dropout in its attention and behind it."""

    def __init__(self, width: int, heads: int = 4, dropout: float = 0.0, written_out: bool = False) -> None:
        super().__init__()
        self.head_size, self.written_out = width // heads, written_out
        self.norm, self.inner_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down, self.dropout = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.Dropout(dropout)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (-1, self.head_size)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1)
        )
        if self.written_out:
            mixed = torch.softmax(q @ k.mT, -1) @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout.p, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))
        return x + scale * self.dropout(self.down(torch.tanh(self.up(self.inner_norm(x)))))
