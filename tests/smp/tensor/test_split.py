"""A marked model that is split over tensor ranks trains as the whole one does on one process."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import atorch.smp as smp
from atorch.auto.context import ModelFacts
from atorch.auto.pretrained import load_whole_state
from atorch.distributed.mesh import Mesh
from atorch.errors import AtorchError
from atorch.runtime.tensor_parallel.state import whole_state
from atorch.smp.tensor.split import TensorSplit, split_marked
from tests import language_models
from tests.auto.training import messages
from tests.contract.job import distance, updates
from tests.pool import Pool, on_ranks
from tests.smp.job import several

VOCAB, STEPS = 63, 3  # a vocabulary that no number of ranks divides


class HandWritten(nn.Module):
    """Distributed modules between plain ones, none repeated."""

    def __init__(self) -> None:
        super().__init__()
        self.table = smp.nn.DistributedEmbedding(VOCAB, 16)
        self.norm = nn.LayerNorm(16)
        self.up = smp.nn.DistributedLinear(16, 24)
        self.down = smp.nn.DistributedLinear(24, 16)
        self.head = nn.Linear(16, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.norm(self.table(ids))
        return self.head(hidden + self.down(F.gelu(self.up(hidden))))


class Tied(nn.Module):
    """One table for words and logits, without blocks, made where everything is marked."""

    def __init__(self) -> None:
        super().__init__()
        with smp.tensor_parallelism():
            self.table = nn.Embedding(VOCAB, 16, padding_idx=60)
            self.head = nn.Linear(16, VOCAB)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.table(ids)))


class Logits(nn.Module):
    """A model whose forward takes ids, of what takes and gives more."""

    def __init__(self, inner: nn.Module, call: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.call = inner, call

    def forward(self, ids: Tensor) -> Tensor:
        return self.call(self.inner, ids)


def language_model() -> nn.Module:
    return Logits(
        smp.nn.DistributedTransformerLMHead(
            num_layers=2, num_attention_heads=4, attention_head_size=4, hidden_size=16, intermediate_size=24,
            vocab_size=VOCAB, num_positions=16, attention_dropout_prob=0.0, hidden_dropout_prob=0.0,
            causal_mask_size=16, pre_layernorm=True,
        ),
        lambda model, ids: model((ids, None, None, None, None)),
    )  # fmt: skip


def gpt2() -> nn.Module:
    model = language_models.gpt2(VOCAB, 16, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0)
    smp.set_tensor_parallelism(model)
    return Logits(model, lambda model, ids: model(ids).logits)


def llama() -> nn.Module:
    model = language_models.llama(VOCAB, 16, 24, tie_word_embeddings=True)
    smp.set_tensor_parallelism(model)
    return Logits(model, lambda model, ids: model(ids).logits)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "hand-written": HandWritten, "tied": Tied, "language model": language_model, "gpt2": gpt2, "llama": llama,
}  # fmt: skip


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]()


def batch(step: int, rank: int = 0) -> Tensor:
    return torch.randint(0, VOCAB, (2, 16), generator=torch.Generator().manual_seed(100 * step + rank))


def batch_of_all(step: int, size: int) -> Tensor:
    """A step's tensors once they are gathered over the tensor ranks, of which each has rows of its own."""
    return torch.cat([batch(step, rank) for rank in range(size)])


def loss_of(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), ids[:, : logits.shape[1]].flatten())


def split(model: nn.Module, size: int) -> TensorSplit:
    mesh = Mesh((("tensor", size), ("pipeline", 1), ("data", 1)), None, "cpu")
    return split_marked(model, lambda: model(batch_of_all(0, size)[:2]), mesh)


def train(model: nn.Module, size: int) -> list[float]:
    optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(STEPS):
        ids = batch_of_all(step, size)
        loss = loss_of(model(ids), ids)
        loss.backward()
        optim.step()
        optim.zero_grad()
        losses.append(loss.item())
    return losses


def parity(rank: int, size: int, name: str, recomputed: tuple[str, ...] = ()) -> dict[str, Any]:
    model, plain = make(name), make(name)
    for path, module in model.named_modules():
        if path.rpartition(".")[2] in recomputed:
            smp.set_activation_checkpointing(module)
    if rank:  # which is put right before anything is split
        nn.init.ones_(next(model.parameters()))
    before = {key: value.clone() for key, value in plain.state_dict().items()}
    done = split(model, size)
    whole = whole_state(model, done, done.group)
    same_state = whole.keys() == before.keys() and all(torch.equal(whole[key], before[key]) for key in before)
    losses, expected = train(model, size), train(plain, size)
    shared = {key: value for key, value in model.state_dict().items() if key not in done.cuts}
    return {
        "same state": same_state,
        "held": sum(p.numel() for p in model.parameters()) / sum(p.numel() for p in plain.parameters()),
        "loss": max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True)),
        "update": distance(updates(before, whole_state(model, done, done.group)), updates(before, plain.state_dict())),
        "kept": dict(done.kept),
        "shared": {key: value.clone() for key, value in shared.items()},
    }


# The most that one of two ranks holds of the parameters.
HELD = {"hand-written": 0.7, "tied": 0.55, "language model": 0.55, "gpt2": 0.52}
WAYS: list[tuple[str, tuple[str, ...]]] = [
    *((name, ()) for name in HELD),
    ("language model", ("attention", "dense1", "word_embedding")),  # recomputed
]


def test_trains_as_the_whole_model(pool: Pool) -> None:
    first, other = pool.run(several, [(parity, *way) for way in WAYS])
    for (name, _), *pair in zip(WAYS, first, other, strict=True):
        for seen in pair:
            assert seen["same state"]
            assert seen["loss"] <= 1e-5
            assert seen["update"] <= 1e-4
            assert seen["held"] < HELD[name]
            assert not seen["kept"]
        assert all(torch.equal(value, pair[1]["shared"][key]) for key, value in pair[0]["shared"].items())


def test_rows_that_several_ranks_need_are_whole_on_each(pool: Pool) -> None:
    """Of two heads of keys and values on four ranks."""
    for seen in pool.run(parity, "llama", ranks=4):
        assert seen["update"] <= 1e-4
        assert set(seen["kept"].values()) == {"several ranks need the same of its rows"}
        assert {name.split(".")[-2] for name in seen["kept"]} == {"k_proj", "v_proj"}


def delayed(rank: int, size: int) -> tuple[dict[str, Tensor], int, list[float]]:
    with smp.delay_param_initialization():
        model = make("hand-written")
    assert all(parameter.is_meta for parameter in model.parameters())
    torch.manual_seed(3 + rank)
    done = split(model, size)
    whole = {name: value.clone() for name, value in whole_state(model, done, done.group).items()}
    return whole, len(done.cuts), train(model, size)


def test_delayed_parameters_have_values_of_one_draw(pool: Pool) -> None:
    (whole, num_cuts, losses), (other, _, other_losses) = pool.run(delayed)
    assert num_cuts == 4
    assert all(torch.equal(whole[name], other[name]) for name in whole)
    assert whole["up.weight"].std() > 0.01
    assert losses == pytest.approx(other_losses)


class Odd(nn.Module):
    """Linear layers that are used in other ways than by being called, or not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.read = nn.Linear(16, 16)
        self.tied = nn.Linear(16, 16, bias=False)
        self.other = nn.Linear(16, 16, bias=False)
        self.other.weight = self.tied.weight
        self.idle = nn.Linear(16, 16)
        self.few = nn.Linear(16, 1)
        self.conv = nn.Conv1d(16, 16, 1)
        self.norms = nn.Embedding(VOCAB, 16, max_norm=1.0)
        smp.set_tensor_parallelism(self)
        smp.set_tensor_parallelism(self.other, False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norms(ids) @ self.read.weight
        x = self.conv(self.other(self.tied(x)).mT).mT
        return self.few(x)


@on_ranks(2)
def test_what_stays_whole_is_told_by_name(rank: int, size: int) -> None:
    torch.manual_seed(0)
    assert split(Odd(), size).kept == {
        "read.weight": "it is used outside of the modules that hold it",
        "tied.weight": "it is tied to other.weight, which is not to be split",
        "idle.weight": "the batch did not reach it",
        "few.weight": "it has too few rows for every rank to have one",
        "conv.weight": "nothing splits it, and by themselves only linear layers and tables are split",
        "norms.weight": "max_norm and scale_grad_by_freq need the whole table",
    }


@on_ranks(2)
def test_state_goes_and_comes_whole(rank: int, size: int) -> None:
    """Saved whole, and loaded at another degree."""
    model = make("gpt2")
    saved = {key: value + 1 for key, value in model.state_dict().items()}
    mesh = Mesh((("tensor", size), ("pipeline", 1), ("data", 1)), None, "cpu")
    done: Any = split_marked(model, lambda: model(batch(0)), mesh)
    vars(model)["_atorch"] = ModelFacts(mesh, layout=done)
    load_whole_state(model, saved)
    back = whole_state(model)
    assert all(torch.equal(back[key], saved[key]) for key in saved)
    with pytest.raises(AtorchError, match=r"shape \(3, 16\), and the whole model's \S+ is \(63, 16\)"):
        load_whole_state(model, {"inner.transformer.wte.weight": torch.zeros(3, 16)}, strict=False)


def refused(rank: int, size: int, what: str) -> list[str]:
    mesh = Mesh((("tensor", size), ("pipeline", 1), ("data", 1)), None, "cpu")
    model = make("tied") if what != "unmarked" else nn.Sequential(nn.Embedding(VOCAB, 4), nn.Linear(4, VOCAB))
    if what == "other marks" and rank:
        smp.set_tensor_parallelism(model, False)
    runs: dict[str, Callable[[], Any]] = {
        "other rows": lambda: model(batch(rank)),
        "raises": lambda: model(batch(0)) if rank else model(torch.zeros(1)),
    }
    with messages() as said:
        try:
            done = split_marked(model, runs.get(what, lambda: model(batch(0))), mesh)
            said.append(f"{done.degree} {len(done.cuts)}")
        except (AtorchError, RuntimeError) as error:
            said.append(str(error))
    return said


REFUSED = {
    "other rows": "the ranks of the tensor axis compute other outputs",
    "raises": "rank 0 failed: ",
    "other marks": "what is marked for tensor parallelism differs between processes: ",
    "unmarked": "2 0",
}


def test_all_ranks_refuse_together(pool: Pool) -> None:
    first, other = pool.run(several, [(refused, what) for what in REFUSED])
    for (what, told), one, two in zip(REFUSED.items(), first, other, strict=True):
        assert told in two[-1]
        assert told in one[-1] or what == "raises"
    assert "nothing of Sequential is marked for tensor parallelism" in first[-1][0]
    assert "smp.set_tensor_parallelism(model)" in first[-1][0]


def test_one_rank_splits_nothing() -> None:
    model = make("tied")
    mesh = Mesh((("tensor", 1), ("pipeline", 1), ("data", 1)), None, "cpu")
    done = split_marked(model, lambda: model(batch(0)), mesh)
    assert whole_state(model, done, done.group).keys() == model.state_dict().keys()
    assert not done.cuts
