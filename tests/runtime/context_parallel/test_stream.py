"""Models whose tokens are split, with attention around a ring, train as they do whole; or are refused by name."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from atorch.errors import AtorchError
from atorch.profiler.memory_tracker import CommCounter
from atorch.runtime.context_parallel import RingExchange
from atorch.runtime.sequence_parallel import TokenPartition, split_stream
from tests.pool import Pool, on_ranks
from tests.runtime.sequence_parallel.training import Stack, average
from tests.runtime.tensor_parallel.models import VOCAB, loss_of, make, side_by_side

TOKENS = 12  # of a sequence: two pieces for each of two or three ranks


def split(model: nn.Module, inputs: Any, *, balanced: bool = True) -> None:
    group: Any = dist.group.WORLD
    exchange = RingExchange(group, load_balance=balanced)
    split_stream(model, lambda model: model(**inputs), TokenPartition(group, balanced=balanced), exchange)


def inputs(name: str, step: int = 0) -> dict[str, Tensor]:
    """The inputs of a step, the same on every rank. BERT's are padded behind, the padded Llama's before."""
    tokens = torch.randint(0, VOCAB, (3, TOKENS), generator=torch.Generator().manual_seed(100 + step))
    mask = torch.ones_like(tokens)
    if name == "bert":
        mask[1, -3:] = 0
    elif name == "padded":
        mask[1, :5] = 0
    return {"input_ids": tokens, "attention_mask": mask}


def loss_on(model: nn.Module, name: str, step: int) -> Tensor:
    """Padded tokens have no part in it."""
    given = inputs(name, step)
    return loss_of(SimpleNamespace(logits=model(**given).logits * given["attention_mask"][..., None]))


def parity(rank: int, size: int, name: str, balanced: bool) -> dict[str, Any]:
    """A model with its tokens on all ranks beside the same one whole."""
    model = make("llama" if name == "padded" else name)
    plain = copy.deepcopy(model)
    split(model, inputs(name), balanced=balanced)
    with CommCounter() as forward:
        loss = loss_on(model, name, 0)
    with CommCounter() as backward:
        loss.backward()
    model.zero_grad()
    return {
        **side_by_side(model, plain, lambda model, step: loss_on(model, name, step), reduce=average),
        "forward": {kind: calls for (kind, _), (calls, _) in forward.counts.items()},
        "backward": {kind: calls for (kind, _), (calls, _) in backward.counts.items()},
    }


LAYERS = 2
MORE = [(name, True, 2) for name in ("llama", "gpt2", "mixtral", "phi3", "qwen3")]
MORE += [("llama", True, 3), ("llama", False, 2), ("padded", False, 3), ("bert", True, 3)]


@pytest.mark.parametrize(
    ("name", "balanced", "ranks"),
    [("bert", False, 2), ("padded", True, 2), *(pytest.param(*case, marks=pytest.mark.nightly) for case in MORE)],
)
def test_a_split_model_trains_as_a_whole_one(pool: Pool, name: str, balanced: bool, ranks: int) -> None:
    """Each block sends keys and values n - 1 times in forward, in backward with their gradients.

    The loss asks for all logits; in backward embeddings are of a rank's own tokens, but for BERT's, which are gathered.
    """
    hops = LAYERS * (ranks - 1)
    for found in pool.run(parity, name, balanced, ranks=ranks):
        assert found["loss"] <= 2e-5
        assert found["update"] <= 1e-4
        assert found["forward"] == {"send": hops, "receive": hops, "all_gather": 1}
        gathered = {"all_gather": 1} if name == "bert" else {}
        assert found["backward"] == {"send": 2 * hops, "receive": 2 * hops, **gathered}


REFUSED = {
    "learnt": "the mask needs a gradient",
    "own mask": "from the tokens that it is given",
    "mixing": "the value of its attention is not that of the part's tokens",
}


@on_ranks()
def test_what_cannot_be_split_is_refused_by_name_at_once_or_later(rank: int, size: int) -> None:
    for kind, told in REFUSED.items():
        torch.manual_seed(1)
        model = Stack(kind)
        before = [type(module) for module in model.modules()], copy.deepcopy(model.state_dict())
        with pytest.raises(AtorchError, match=f"(?s)(blocks.0.*{told}|{told}.*blocks.0)"):
            split(model, {"x": torch.randn(3, TOKENS, 8)})
        assert [type(module) for module in model.modules()] == before[0]
        assert all(value.equal(before[1][name]) for name, value in model.state_dict().items())
    torch.manual_seed(1)
    model, x = Stack("plain"), torch.randn(3, TOKENS, 8)
    split(model, {"x": x})
    told = r"the mask is \(6, 6\), and the whole sequences have 12 queries and 12 keys"
    with pytest.raises(AtorchError, match=told):
        model(x, torch.ones(TOKENS // 2, TOKENS // 2, dtype=torch.bool))
