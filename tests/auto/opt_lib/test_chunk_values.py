"""chunk under models that look at values: torch's own TransformerEncoder with its masks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from atorch import auto_accelerate
from tests.pool import Pool

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")

WORDS, PAD, BATCH = 20, 0, 4
BUDGET = 130_000
MASKS = (
    "mask",
    "mask and padding",
    pytest.param("is_causal", marks=pytest.mark.matrix),  # these two run on fake tensors, too
    pytest.param("src_key_padding_mask", marks=pytest.mark.matrix),
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
