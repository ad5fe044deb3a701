"""Embeddings, norms, heads and losses are computed of a rank's own tokens, where they work token by token."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from atorch.profiler.memory_tracker import CommCounter
from atorch.runtime.context_parallel import RingExchange
from atorch.runtime.sequence_parallel import TokenPartition, Ulysses, split_stream
from tests.pool import Pool, on_ranks
from tests.runtime.sequence_parallel.training import Block, average
from tests.runtime.tensor_parallel.models import VOCAB, make, side_by_side

TOKENS, WIDTH = 16, 16


class Plain(nn.Module):
    """Of torch alone; what stands between blocks and head is of a kind that a test says."""

    def __init__(self, kind: str = "plain") -> None:
        super().__init__()
        self.kind = kind
        self.tokens, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block("causal", WIDTH) for _ in range(2))
        self.norm = nn.BatchNorm1d(WIDTH) if kind == "statistics" else nn.LayerNorm(WIDTH)
        self.mix = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]).unsqueeze(0))
        for block in self.blocks:
            x = block(x)
        if self.kind == "statistics":
            x = self.norm(x.flatten(0, 1)).view(x.shape)
        elif self.kind == "mixing":
            x = self.mix(x.transpose(1, 2)).transpose(1, 2)
        elif self.kind == "pooled":
            return self.head(self.norm(x).mean(1, keepdim=True).expand_as(x))  # type: ignore[no-any-return]
        elif self.kind == "by hand":
            x = x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
            return F.linear(x, self.tokens.weight)
        else:
            x = self.norm(x)
        return self.head(x)  # type: ignore[no-any-return]


MORE = [(name, True, 2) for name in ("gpt2", "mixtral", "qwen3")] + [("llama", True, 4)]
MORE += [(name, False, 4) for name in ("plain", "gpt2", "phi3")]
KINDS = ("plain", "statistics", "mixing", "pooled", "by hand")


def model_of(name: str) -> nn.Module:
    torch.manual_seed(3)
    return Plain(name) if name in KINDS else make(name)


def loss_of(model: nn.Module, name: str, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 + step)
    ids = torch.randint(0, VOCAB, (3, TOKENS), generator=generator)
    labels = ids.clone()
    labels[1, 3:7] = -100
    if name not in KINDS:
        return model(input_ids=ids, labels=labels).loss  # type: ignore[no-any-return]
    logits = model(ids)
    return F.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), labels[:, 1:].reshape(-1))


def split(model: nn.Module, name: str, *, ring: bool) -> None:
    group: Any = dist.group.WORLD
    exchange: Any = RingExchange(group, load_balance=True) if ring else Ulysses(group)
    ids = torch.arange(2 * TOKENS).view(2, TOKENS) % VOCAB
    split_stream(
        model,
        (lambda model: model(ids)) if name in KINDS else (lambda model: model(input_ids=ids)),
        TokenPartition(group, balanced=ring),
        exchange,
    )


def parity(rank: int, size: int, name: str, ring: bool) -> dict[str, Any]:
    """A model whose tokens are on all ranks beside the same one whole."""
    model = model_of(name)
    plain = copy.deepcopy(model)
    split(model, name, ring=ring)
    found = side_by_side(model, plain, lambda model, step: loss_of(model, name, step), reduce=average, lr=0.05)
    parameters, largest = {each.data_ptr() for each in model.parameters()}, 0

    def note(tensor: Tensor) -> Tensor:
        nonlocal largest
        is_logits = tensor.shape[-1:] in ((VOCAB,), (VOCAB + 1,)) and tensor.data_ptr() not in parameters
        largest = max(largest, tensor.numel() if is_logits else 0)
        return tensor

    with CommCounter() as sent, torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss_of(model, name, 0).backward()
    return {
        **found,
        "logits": largest,
        "gathered": [each for (kind, _), (_, each) in sent.counts.items() if kind == "all_gather"],
    }


@pytest.mark.parametrize(
    ("name", "ring", "ranks"),
    [("llama", False, 2), ("plain", True, 4), *(pytest.param(*case, marks=pytest.mark.nightly) for case in MORE)],
)
def test_logits_and_losses_are_of_a_ranks_own_tokens(pool: Pool, name: str, ring: bool, ranks: int) -> None:
    """What is saved of logits is a rank's share; all that is gathered is a number a token, and labels are not."""
    for seen in pool.run(parity, name, ring, ranks=ranks):
        assert seen["loss"] <= 1e-5
        assert seen["update"] <= 1e-4
        assert 3 * TOKENS * VOCAB <= seen["logits"] * ranks <= 3 * TOKENS * (VOCAB + 1)
        assert seen["gathered"] == [4 * 3 * TOKENS]


@on_ranks()
def test_what_looks_at_several_tokens_gets_them_all(rank: int, size: int) -> None:
    for kind, seen in {kind: parity(rank, size, kind, False) for kind in KINDS[1:]}.items():
        assert seen["loss"] <= 1e-5, kind
        assert seen["update"] <= 1e-4, kind
