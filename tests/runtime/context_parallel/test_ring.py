"""Ring attention is attention: results and gradients of every rank, what it sends, and what it refuses."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from atorch.cost.comm import of_copy
from atorch.cost.parallelism import split_context
from atorch.errors import ArgumentError
from atorch.profiler.memory_tracker import CommCounter
from atorch.runtime.context_parallel import Deal, ring_attention
from tests.auto.opt_lib.splitting import BLOCK, on_mesh
from tests.auto.training import run_each
from tests.pool import Pool, on_ranks

BATCH, HEADS, LENGTH, DIM = 2, 4, 48, 8


@dataclass(frozen=True)
class Case:
    """One attention."""

    mask: str = "none"
    groups: int = HEADS
    balanced: bool = True
    dtype: torch.dtype = torch.float32
    num_keys: int = LENGTH
    dim_of_values: int = DIM

    @property
    def is_causal(self) -> bool:
        return self.mask == "causal"

    def tensors(self) -> list[Tensor]:
        """Whole queries, keys, values, and the gradient of the result."""
        generator = torch.Generator().manual_seed(5)
        shapes = (
            (HEADS, LENGTH, DIM), (self.groups, self.num_keys, DIM), (self.groups, self.num_keys, self.dim_of_values),
            (HEADS, LENGTH, self.dim_of_values),
        )  # fmt: skip
        return [torch.randn(BATCH, *shape, generator=generator).to(self.dtype) for shape in shapes]

    def whole_mask(self) -> Tensor | None:
        """Padding on either side, with and without a causal mask; a window; learnt biases that are not learnt now."""
        if self.mask == "biases":
            generator = torch.Generator().manual_seed(6)
            return torch.randn(HEADS, LENGTH, self.num_keys, generator=generator).to(self.dtype)
        padding = torch.arange(self.num_keys) >= torch.tensor([0, 29])[:, None, None, None]
        causal = torch.ones(LENGTH, self.num_keys, dtype=torch.bool).tril()
        return {
            "none": None,
            "causal": None,
            "padding": padding,
            "padded causal": padding & causal,
            "window": causal & torch.ones_like(causal).triu(-7),
        }[self.mask]


def plain(case: Case) -> list[Tensor]:
    """Result and gradients of torch's attention on whole sequences."""
    *inputs, grad = case.tensors()
    for each in inputs:
        each.requires_grad_()
    out = scaled_dot_product_attention(*inputs, case.whole_mask(), is_causal=case.is_causal, enable_gqa=True)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


def around(rank: int, size: int, case: Case, dropout_p: float = 0.0) -> list[Tensor]:
    """The same on this rank's slices."""
    deal = Deal(size, case.balanced)
    *inputs, grad = (each[:, :, deal.tokens(rank, each.shape[2])] for each in case.tensors())
    for each in inputs:
        each.requires_grad_()
    out = ring_attention(
        *inputs,
        group=dist.group.WORLD,
        mask=case.whole_mask(),
        is_causal=case.is_causal,
        load_balance=case.balanced,
        dropout_p=dropout_p,
    )
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


def distances(rank: int, size: int, case: Case) -> list[float]:
    """Distances of this rank's result and gradients from its rows of the plain ones."""
    deal = Deal(size, case.balanced)
    wanted = [each[:, :, deal.tokens(rank, each.shape[2])] for each in plain(replace(case, dtype=torch.float64))]
    got = around(rank, size, case)
    assert all(one.dtype == case.dtype and one.shape == other.shape for one, other in zip(got, wanted, strict=True))
    return [float((a - b).norm() / b.norm()) for a, b in zip(got, wanted, strict=True)]


BANDS = {torch.float32: 1e-5, torch.bfloat16: 1.5e-2, torch.float64: 1e-13}
"""bf16's eps is 7.8e-3: results are rounded once a hop and merged in fp32, gradients of keys once a hop."""


MASKS = ("none", "causal", "padding", "padded causal", "window", "biases")
CASES = [Case(mask, groups, balanced) for mask in MASKS for groups in (4, 2) for balanced in (False, True)]
CASES += [
    Case(mask, 2, dtype=dtype)
    for mask in ("none", "causal", "padded causal")
    for dtype in (torch.bfloat16, torch.float64)
]
CASES += [Case("padding", num_keys=72), Case(num_keys=24), Case("causal", 2, dim_of_values=4)]  # of another sequence


@pytest.mark.parametrize("ranks", [3, *(pytest.param(ranks, marks=pytest.mark.nightly) for ranks in (2, 4))])
def test_it_is_attention(pool: Pool, ranks: int) -> None:
    cases = [case for case in CASES if ranks == 3 or case.dtype == torch.float32]
    for case, errors in zip(cases, run_each(pool, distances, [(case,) for case in cases], ranks=ranks), strict=True):
        assert max(map(max, errors)) <= BANDS[case.dtype], case


@on_ranks()
def test_a_query_that_sees_nothing_gets_nothing(rank: int, size: int) -> None:
    """Padding before the first token under a causal mask, as torch has it: zeros, and no NaN in any gradient."""
    out, *gradients = around(rank, size, Case("padded causal", balanced=False))
    assert not out[1, :, : 24 if rank == 0 else 5].any()
    assert not any(each.isnan().any() for each in gradients)


def counted(rank: int, size: int, groups: int) -> dict[str, tuple[int, float]]:
    with CommCounter() as sent:
        around(rank, size, Case("causal", groups))
    return {kind: counts for (kind, _), counts in sent.counts.items()}


@pytest.mark.parametrize("ranks", [2, 3])
def test_it_sends_what_the_cost_says(pool: Pool, ranks: int) -> None:
    num_bytes = BATCH * HEADS * LENGTH * DIM * 4.0
    for groups, found in zip((4, 2), run_each(pool, counted, [(4,), (2,)], ranks=ranks), strict=True):
        block = replace(BLOCK, input_bytes=num_bytes, matmuls=(), num_heads=HEADS, num_kv_heads=groups)
        cost = replace(split_context(on_mesh({"context": ranks}, batch_size=2)), segments=(block,), dtype="float32")
        (expected,) = of_copy(cost, block)
        assert found == [dict.fromkeys(("send", "receive"), (expected.count, expected.num_bytes))] * ranks


@on_ranks()
def test_dropout_differs_between_ranks_and_is_drawn_from_torchs_generator(rank: int, size: int) -> None:
    """The same seed on every rank; gradients are those of what was drawn: see test_kernels."""
    found = []
    for dropout in (0.5, 0.5, 0.0):
        torch.manual_seed(0)
        found.append(around(rank, size, Case("causal"), dropout))
    first, second, whole = found
    assert all(one.equal(other) for one, other in zip(first, second, strict=True))
    assert not any(one.allclose(other) for one, other in zip(first, whole, strict=True))


@on_ranks()
def test_what_it_cannot_honour_is_refused(rank: int, size: int) -> None:
    query, key, value, _ = (each[:, :, :24] for each in Case().tensors())
    said = []
    for more in (
        {"mask": torch.ones(24, 24, dtype=torch.bool)},
        {"mask": torch.zeros(48, 48, requires_grad=True)},
        {"mask": torch.zeros(48, 48), "is_causal": True},
        {"is_causal": True, "key": key[:, :, :12], "value": value[:, :, :12]},
    ):
        arguments = {"query": query, "key": key, "value": value, **more}
        with pytest.raises(ArgumentError) as caught:
            ring_attention(**arguments, group=dist.group.WORLD)
        said.append(str(caught.value))
    wanted = (
        "whole sequences have 48 queries and 48 keys",
        "needs a gradient",
        "beside is_causal",
        "48 queries and 24 keys",
    )
    assert all(words in message for words, message in zip(wanted, said, strict=True)), said
