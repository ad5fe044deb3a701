"""What pipelines are held to: models and batches of several kinds, and plain training of the same."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset

from atorch import clip_grad_norm
from tests.auto.training import accelerate
from tests.contract.job import first_names, snapshot
from tests.language_models import bert, gpt2, llama, mixtral, t5, vit
from tests.runtime.pipeline.unmodular import UNMODULAR

VOCAB, WIDTH, SEQ, ROWS = 64, 16, 12, 8


class TwiceUsed(nn.Module):
    """One block is called twice, a parameter lies outside of modules, and the output is a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 2, 32, 0.0, batch_first=True) for _ in range(4))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        hidden = self.embed(input_ids)
        for layer in (*self.layers, self.layers[0]):
            hidden = layer(hidden) * self.scale
        return {"logits": self.head(hidden)}


class Rooted(nn.Module):
    """Parameters of its own before, between and behind its blocks, each used in code that several stages run."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCAB, WIDTH), nn.Parameter(torch.randn(SEQ, WIDTH) / 10)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 2, 32, 0.0, batch_first=True) for _ in range(4))
        self.gains = nn.ParameterList(torch.rand(WIDTH) + 0.5 for _ in range(5))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.embed(input_ids) + self.position
        for layer, gain in zip(self.layers, self.gains, strict=False):
            hidden = layer(hidden) * gain
        return {"logits": self.head(hidden) + (hidden * self.gains[4]).mean()}


class Adding(nn.Module):
    """A residual block that changes what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden += self.inner(hidden * 1.0).tanh()
        return hidden


class InPlace(nn.Module):
    """Blocks, and the model between them, that write to what they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCAB, WIDTH), nn.Embedding(SEQ, WIDTH)
        self.layers = nn.ModuleList(Adding() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.embed(input_ids)
        hidden += self.position(torch.arange(input_ids.shape[1]))
        for layer in self.layers:
            hidden = layer(hidden)
            hidden *= 0.9
        return {"logits": self.head(hidden)}


class InTwoPlaces(nn.Linear):
    """It returns one tensor in two places, as models do that also return all hidden states."""

    def forward(self, hidden: torch.Tensor) -> dict[str, Any]:
        hidden = super().forward(hidden).tanh()
        return {"last": hidden, "all": (hidden,)}


class Repeating(TwiceUsed):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(InTwoPlaces(WIDTH, WIDTH) for _ in range(4))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = torch.stack((layer(hidden)["last"], self.scale.expand_as(hidden))).sum(0)
        return {"logits": self.head(hidden)}


class Dropping(InPlace):
    """It drops tokens in training, as vision transformers with patch dropout do; `by_value`: as many as the batch says.

    The last layer's output is stretched again.
    """

    def __init__(self, by_value: bool = False) -> None:
        super().__init__()
        self.by_value = by_value

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.layers[0](self.embed(input_ids))
        kept = 1 + int(input_ids[0, 0]) % SEQ if self.by_value else SEQ // 2
        hidden = hidden[:, :kept] if self.training else hidden
        for layer in self.layers[1:]:
            hidden = layer(hidden.clone())
        return {"logits": self.head(nn.functional.interpolate(hidden.mT, SEQ).mT)}


class Frozen(nn.Module):
    """Two inputs, a frozen embedding, and a mask that skips stages."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH).requires_grad_(False)
        self.gate = nn.Linear(WIDTH, 1)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 2, 32, 0.0, batch_first=True) for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.embed(input_ids)
        gate = self.gate(hidden).sigmoid()
        for layer in self.layers:
            hidden = layer(hidden)
        return {"logits": self.head(hidden * gate)}


SIZES: Mapping[str, int] = {"vocab": VOCAB, "width": WIDTH, "layers": 4}
MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "llama": partial(llama, **SIZES, inner=24, max_position_embeddings=64, bos_token_id=0, eos_token_id=1),
    "mixtral": partial(mixtral, **SIZES, inner=24, max_position_embeddings=64, bos_token_id=0, eos_token_id=1),
    "bert": partial(bert, **SIZES, inner=24, positions=64),
    "t5": partial(t5, VOCAB, WIDTH, 24, pad_token_id=0),
    "gpt2": partial(gpt2, **SIZES, positions=64, eos_token_id=1, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
    "vit": partial(vit, WIDTH, 24, 4, image=16, patch=8, num_labels=5),
}


def make_model(name: str) -> nn.Module:
    """A small model of a kind; the same weights every time."""
    torch.manual_seed(3)
    return {**MODELS, **OWN}[name]()


OWN: dict[str, Callable[[], nn.Module]] = {
    "twice": TwiceUsed, "frozen": Frozen, "inplace": InPlace, "rooted": Rooted, "dropping": Dropping,
    "repeating": Repeating,
    "dropping by value": partial(Dropping, by_value=True), **UNMODULAR,
}  # fmt: skip


class Samples(Dataset[dict[str, torch.Tensor]]):
    """Fixed random samples; unless `even`, micro-batches have different numbers of labels."""

    def __init__(self, name: str, num: int, seq: int = SEQ, *, even: bool = False) -> None:
        generator = torch.Generator().manual_seed(7)
        if name == "vit":
            images, classes = torch.randn(num, 3, 16, 16, generator=generator), torch.arange(num) % 5
            self.data: dict[str, torch.Tensor] = {"pixel_values": images, "labels": classes}
            return
        tokens = torch.randint(2, VOCAB, (num, seq), generator=generator)
        labels = tokens.clone()
        self.data = {"input_ids": tokens, "labels": labels}
        if even:
            return
        labels[torch.arange(seq)[None] > 3 + 2 * (torch.arange(num)[:, None] % 4)] = -100
        if name not in OWN and name != "t5":
            self.data["attention_mask"] = (torch.arange(seq) < seq - torch.arange(num)[:, None] % 3).long()

    def __len__(self) -> int:
        return len(self.data["labels"])

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: values[index] for name, values in self.data.items()}


def loss_func(batch: Any, output: Any) -> torch.Tensor:
    """The model's own loss, or that of its logits."""
    if "loss" in output:
        return output["loss"]
    return nn.functional.cross_entropy(output["logits"].flatten(0, 1), batch["labels"].flatten())


def loop(model: Any, loss_of: Any, optim: Any, batches: list[Any], accumulate: int = 1) -> tuple[list[float], float]:
    """Losses, and the last norm of the gradients."""
    losses, norm = [], 0.0
    for number, batch in enumerate(batches, start=1):
        loss = loss_of(batch, model(**batch))
        (loss / accumulate).backward()
        losses.append(loss.item())
        if number % accumulate == 0:
            norm = float(clip_grad_norm(model, 1e6))
            optim.step()
            optim.zero_grad()
    return losses, norm


def penalised(model: nn.Module, loss_of: Any, penalty: float) -> Any:
    """The loss with a penalty on all parameters of the model, as people write it by hand."""

    def loss(batch: Any, output: Any) -> torch.Tensor:
        return loss_of(batch, output) + penalty * sum(each.pow(2).sum() for each in model.parameters())

    return loss if penalty else loss_of


def reference(
    name: str, batches: list[Any], accumulate: int = 1, loss_of: Any = loss_func, penalty: float = 0.0
) -> tuple[dict[str, torch.Tensor], list[float], float]:
    """Updates, losses and norm of plain training on one process."""
    model = make_model(name).train()
    loss_of = penalised(model, loss_of, penalty)
    before = snapshot(model)
    losses, norm = loop(model, loss_of, torch.optim.SGD(model.parameters(), lr=0.1), batches, accumulate)
    after = snapshot(model)
    return {key: after[key] - before[key] for key in after if model.get_parameter(key).requires_grad}, losses, norm


def accelerated(model: nn.Module, strategy: list[Any], data: Any = None, loss: Any = loss_func, **more: Any) -> Any:
    """The result of auto_accelerate with SGD on batches of ROWS samples."""
    more = {"model_input_format": "unpack_dict", **more}
    return accelerate(model, strategy, data, loss, None if data is None else ROWS, **more)


def train(
    name: str,
    strategy: list[Any],
    *,
    steps: int = 4,
    accumulate: int = 1,
    even: bool = False,
    loss_of: Any = loss_func,
    penalty: float = 0.0,
    **more: Any,
) -> dict[str, Any]:
    """How far training `name` under a strategy is from plain training: `update`, `loss`, `norm`, and the names held."""
    data = Samples(name, steps * ROWS, even=even)
    model = make_model(name).train()
    names, before = first_names(model), snapshot(model)
    result = accelerated(model, strategy, data, penalised(model, loss_of, penalty), **more)
    losses, norm = loop(result.model, result.loss_func, result.optim, list(result.dataloader), accumulate)
    whole = [{key: value[step * ROWS : (step + 1) * ROWS] for key, value in data.data.items()} for step in range(steps)]
    expected, expected_losses, expected_norm = reference(name, whole, accumulate, loss_of, penalty)
    after = {names[key]: value for key, value in snapshot(result.model).items()}
    trained = [key for key in after if key in expected]
    errors = torch.stack([(after[key] - before[key] - expected[key]).norm() for key in trained])
    mean = torch.tensor(losses)
    dist.all_reduce(mean)
    mean /= dist.get_world_size()
    return {
        "update": float(errors.norm() / torch.stack([expected[key].norm() for key in trained]).norm()),
        "loss": float((mean - torch.tensor(expected_losses)).abs().max()),
        "norm": abs(norm / expected_norm - 1),
        "names": sorted(after),
        "all": sorted(set(names.values())),
    }
