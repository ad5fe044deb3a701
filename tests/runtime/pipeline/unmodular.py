"""Models whose modules do not tell a pipeline where to cut: for units outside of blocks, and for graphs."""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

VOCAB, WIDTH, LENGTH, DEPTH = 64, 16, 32, 4


class Functional(nn.Module):
    """Written with functions: all parameters are the model's own, the table is the head as well, a buffer of biases."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(VOCAB, WIDTH))
        self.inner = nn.ParameterList(nn.Parameter(torch.randn(3 * WIDTH, WIDTH) / 4) for _ in range(DEPTH))
        self.outer = nn.ParameterList(nn.Parameter(torch.randn(WIDTH, WIDTH) / 4) for _ in range(DEPTH))
        self.frozen = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        self.register_buffer("distances", -(torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)).abs() / 8)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        hidden, length = F.embedding(input_ids, self.table), input_ids.shape[1]
        mask = self.distances[:length, :length].masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
        for inner, outer in zip(self.inner, self.outer, strict=True):
            query, key, value = F.linear(F.layer_norm(hidden, (WIDTH,)), inner).chunk(3, -1)
            hidden = hidden + F.linear(F.scaled_dot_product_attention(query, key, value, mask), outer)
        output = {"logits": F.linear(hidden * self.frozen, self.table)}
        if labels is not None:
            output["loss"] = F.cross_entropy(output["logits"].flatten(0, 1), labels.flatten())
        return output


class Expert(nn.Module):
    """A block that leaves what it wants to add to the loss on itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        inner = self.inner(hidden)
        self.auxiliary = inner.square().mean((1, 2))
        return hidden + self.outer(inner.tanh())


class Leaving(nn.Module):
    """Blocks leave tensors that the model collects in the end."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.layers = nn.ModuleList(Expert() for _ in range(DEPTH))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        auxiliary = torch.stack([layer.auxiliary for layer in self.layers]).sum(0)
        return {"logits": self.head(hidden) * (1 + 0.1 * auxiliary[:, None, None])}


class Layers(nn.Module):
    """Layers one after another, and no blocks that repeat."""

    def __init__(self) -> None:
        super().__init__()
        widths = ((WIDTH, 24), (24, 32), (32, 24), (24, WIDTH))
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.Sequential(*(layer for sizes in widths for layer in (nn.Linear(*sizes), nn.GELU())))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        return {"logits": self.head(self.layers(self.embed(input_ids)))}


class Choosing(Leaving):
    """What it does depends on values, which no graph tells."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        output = super().forward(input_ids, labels)
        return output if float(output["logits"].sum()) < 1e9 else {"logits": output["logits"] * 2}


class Counting(Functional):
    """It changes a buffer as it runs."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        self.distances.add_(1e-9)
        return super().forward(input_ids, labels)


UNMODULAR: dict[str, Callable[[], nn.Module]] = {
    "functional": Functional,
    "leaving": Leaving,
    "layers": Layers,
    "choosing": Choosing,
    "counting": Counting,
}
