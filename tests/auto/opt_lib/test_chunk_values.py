"""chunk under models that look at values: torch's own TransformerEncoder with its masks."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from atorch import auto_accelerate
from tests.pool import Pool

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")

WORDS, PAD, BATCH = 20, 0, 4
BUDGET = 130_000
MASKS = (
    "mask",
    "mask and padding",
    pytest.param("is_causal", marks=pytest.mark.nightly),  # these two run on fake tensors, too
    pytest.param("src_key_padding_mask", marks=pytest.mark.nightly),
)


class Masked(nn.Module):
    """An encoder; which masks it is given."""

    def __init__(self, masks: str, layers: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.masks, self.embed = masks, nn.Embedding(WORDS, 16)
        self.encoder, self.head = nn.TransformerEncoder(layer, layers), nn.Linear(16, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        given: dict[str, Any] = {}
        causal = nn.Transformer.generate_square_subsequent_mask(words.shape[1])
        if self.masks != "src_key_padding_mask":
            given["mask"] = causal
        if self.masks == "is_causal":
            given["is_causal"] = True
        if "padding" in self.masks:
            padding = torch.zeros(words.shape).masked_fill(words == PAD, -torch.inf)
            given["src_key_padding_mask"] = padding if "mask" in given else words == PAD
        output: Tensor = self.head(self.encoder(self.embed(words), **given))
        return output


def sample(index: int) -> Tensor:
    """Words with padding, later ones longer, so that passes are foreseen in the middle of training, too."""
    length = 6 + index // 8
    words = torch.randint(1, WORDS, (length,), generator=torch.Generator().manual_seed(index))
    words[length - index % 3 :] = PAD
    return words


def loss_of(words: Tensor, output: Tensor) -> Tensor:
    """Not of padding, for which torch's fast path gives zeros, and its slow one numbers."""
    return F.cross_entropy(output.flatten(0, 1), words.flatten(), ignore_index=PAD, reduction="sum")


def losses(rank: int, size: int, masks: str, strategy: Any) -> list[float]:
    """In training, and in evaluation after each step, where torch has a fast path."""
    _, result, _ = auto_accelerate(
        Masked(masks), torch.optim.SGD, [sample(index) for index in range(24)], loss_of,
        optim_args={"lr": 2e-3}, dataloader_args={"batch_size": BATCH}, load_strategy=strategy,
    )  # fmt: skip
    found = []
    for batch in result.dataloader:
        words = result.prepare_input(batch, "cpu")
        loss = result.loss_func(words, result.model(words))
        loss.backward()
        result.optim.step()
        result.optim.zero_grad()
        result.model.eval()
        with torch.no_grad():
            found += [loss.item(), result.loss_func(words, result.model(words)).item()]
        result.model.train()
    return found


@pytest.mark.parametrize("masks", MASKS)
def test_masks_that_torch_looks_at(pool: Pool, masks: str) -> None:
    chunked = ("chunk", {"budget_bytes": BUDGET, "hybrid": False})
    plain = losses(0, 1, masks, [])
    assert losses(0, 1, masks, [chunked]) == pytest.approx(plain, rel=1e-6)
    by_rank = pool.run(losses, masks, [chunked])
    together = [sum(each) for each in zip(*by_rank, strict=True)]
    assert together == pytest.approx(plain, rel=1e-6)


class Experts(nn.Module):
    """Experts as modules: each process runs those that its samples are sent to."""

    def __init__(self, count: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.ModuleList(nn.Linear(8, count, bias=False) for _ in range(2))
        self.experts = nn.ModuleList(nn.ModuleList(nn.Linear(8, 8) for _ in range(count)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for router, experts in zip(self.router, self.experts, strict=True):
            weight, chosen = router(x).softmax(-1).max(-1)
            added = torch.zeros_like(x)
            for number in chosen.unique().tolist():
                rows = (chosen == number).nonzero()[:, 0]
                added = added.index_add(0, rows, experts[number](x[rows]) * weight[rows, None])
            x = x + added
        return x


def replaced(model: nn.Module) -> nn.Module:
    """With a forward on the instance, as packages patch it."""
    model.forward = partial(type(model).forward, model)  # type: ignore[method-assign]
    return model


def of_experts(rank: int, size: int, strategy: Any) -> list[float]:
    """The parameters' sums after three steps."""
    data = TensorDataset(torch.randn(24, 8, generator=torch.Generator().manual_seed(3)))
    _, result, _ = auto_accelerate(
        replaced(Experts()), torch.optim.SGD, data, lambda batch, output: output.square().mean(),
        optim_args={"lr": 0.1}, dataloader_args={"batch_size": 8}, load_strategy=strategy, verify=False,
        model_input_format="unpack_sequence",
    )  # fmt: skip
    for batch in result.dataloader:
        result.step(batch)
    result.model.eval()
    with torch.no_grad():
        result.model(*batch)
    return [value.sum().item() for value in result.model.state_dict().values()]


def test_experts_that_processes_do_not_share(pool: Pool) -> None:
    plain = of_experts(0, 1, [])
    for sums in pool.run(of_experts, ["chunk"], timeout=60):
        assert sums == pytest.approx(plain, rel=1e-5)
