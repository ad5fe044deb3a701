"""Models that are hard to share out, trained on every rank's own data, and the distance from plain training."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from tests.contract.job import distance, updates

STEPS, BATCH, SEQ, VOCAB = 3, 12, 6, 40


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Awkward(nn.Module):
    """Frozen, scalar, tied and reused parameters, a buffer, and an embedding whose weight is also used directly."""

    def __init__(self) -> None:
        super().__init__()
        width = 12
        self.config = {"width": width}
        self.tokens, self.places = nn.Embedding(VOCAB, width), nn.Embedding(SEQ, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.blocks[2].up.weight = self.blocks[0].up.weight
        self.mixer = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.blocks[1].norm.requires_grad_(False)
        self.register_buffer("shift", torch.linspace(0, 1, width))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]] + self.shift
        for block in self.blocks:
            x = self.mixer(block(block(x)))
        return F.linear(self.frozen(x), self.tokens.weight) * self.scale

    def greet(self) -> str:
        return f"width {self.config['width']}"


SIZES = {"vocab_size": VOCAB, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES["max_position_embeddings"] = SEQ


class Language(nn.Module):
    """From tokens to logits, by a Llama of tied embeddings, or a Bert.

    Bert's head shares its weight with the embedding, its bias with the module around it; it is not the largest layer
    outside of the blocks.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        if kind == "llama":
            tied = {"num_key_value_heads": 1, "tie_word_embeddings": True, "use_cache": False}
            self.llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, hidden_size=16, **tied))
        else:
            rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
            self.bert = transformers.BertForMaskedLM(transformers.BertConfig(**SIZES, hidden_size=4 * VOCAB, **rates))

    def forward(self, tokens: Tensor) -> Tensor:
        (model,) = self.children()
        return model(input_ids=tokens).logits


MODELS: dict[str, Callable[[], nn.Module]] = {
    "awkward": Awkward,
    "llama": partial(Language, "llama"),
    "bert": partial(Language, "bert"),
}


def make(name: str, seed: int = 0) -> nn.Module:
    """The model with the weights of a seed."""
    torch.manual_seed(seed)
    return MODELS[name]()


def param_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups: what has one dimension or none learns three times as fast."""
    flat = [p for p in model.parameters() if p.dim() < 2]
    return [{"params": [p for p in model.parameters() if p.dim() > 1]}, {"params": flat, "lr": 0.15}]


def sgd(groups: Iterable[Any]) -> torch.optim.Optimizer:
    """SGD with a state, so that sharing it out can go wrong."""
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9)


def world() -> dist.ProcessGroup:
    """The group of all ranks."""
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def whole(tensor: Tensor) -> Tensor:
    """The full value in fp32, whatever the tensor is spread over."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).float().clone()


def train(model: nn.Module, optim: torch.optim.Optimizer, rank: int = 0, size: int = 1, accumulate: int = 1) -> None:
    """STEPS steps with a falling learning rate on this rank's part of the global batches."""
    scheduler = torch.optim.lr_scheduler.StepLR(optim, 1, 0.7)
    generator = torch.Generator().manual_seed(11)
    for _ in range(STEPS):
        for _ in range(accumulate):
            tokens = torch.randint(0, VOCAB, (BATCH, SEQ), generator=generator)
            mine = tokens.chunk(size)[rank]
            logits = model(mine)
            loss = F.cross_entropy(logits[:, :-1].reshape(-1, VOCAB).float(), mine[:, 1:].reshape(-1))
            (loss / accumulate).backward()
        optim.step()
        optim.zero_grad()
        scheduler.step()


def deviation(model: nn.Module, name: str, accumulate: int = 1) -> float:
    """‖Δp − Δp_ref‖ / ‖Δp_ref‖ of a trained model against plain training in one process."""
    plain = make(name)
    before = {key: value.clone() for key, value in plain.state_dict().items()}
    train(plain, sgd(param_groups(plain)), accumulate=accumulate)
    got = {key: whole(value) for key, value in model.state_dict().items()}
    return distance(updates(before, got), updates(before, plain.state_dict()))


def clear(optim: torch.optim.Optimizer) -> None:
    """Take an optimizer's state away."""
    optim.state.clear()


def replace(optim: torch.optim.Optimizer) -> None:
    """Put an empty state in the place of an optimizer's."""
    optim.state = defaultdict(dict)
