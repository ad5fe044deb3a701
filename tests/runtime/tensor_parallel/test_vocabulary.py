"""Tables split over the vocabulary, and losses of logits that stay split: training is that of the whole."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from atorch.profiler.memory_tracker import CommCounter
from atorch.runtime.tensor_parallel import tensor_parallel, whole_state
from tests.pool import Pool, on_ranks
from tests.runtime.sharing import Block
from tests.runtime.tensor_parallel.models import SIZES, batch, make, side_by_side
from tests.runtime.tensor_parallel.test_split import mesh_of

BATCH, SEQ, FLOAT = 3, 7, 4


def untied(name: str) -> nn.Module:
    torch.manual_seed(3)
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=4, use_cache=False)
    return transformers.LlamaForCausalLM(config).train() if name == "untied" else make(name)


def labelled(name: str, step: int) -> dict[str, Tensor]:
    """A batch with its labels, some of which do not count."""
    given = batch("t5" if name == "t5" else "llama", step)
    labels = given["input_ids"].roll(step, 1).masked_fill(given["input_ids"] % 5 == 0, -100)
    labels[0, 2:] = -100
    return {**given, "labels": labels}


def loss_of(model: nn.Module, name: str, step: int) -> Tensor:
    """GPT-2's by a loss function of the user's, the others' as the model itself computes it."""
    given = labelled(name, step)
    if name != "gpt2":
        return model(**given).loss
    labels = given.pop("labels")
    return nn.functional.cross_entropy(model(**given).logits.flatten(0, 1), labels.flatten())


def run_labelled(model: nn.Module) -> Any:
    return model(**batch("t5" if isinstance(model, transformers.T5ForConditionalGeneration) else "llama"))


def trained(rank: int, size: int, name: str, options: dict[str, Any]) -> dict[str, Any]:
    model, plain = untied(name), untied(name)
    mesh = mesh_of(size)
    layout = tensor_parallel(model, run_labelled, mesh, as_dtensors=False, **options)
    with torch.no_grad():
        evaluated, expected = float(loss_of(model, name, 0)), float(loss_of(plain, name, 0))
    with CommCounter() as messages:
        loss_of(model, name, 0).backward()
    model.zero_grad()
    return {
        "evaluated": abs(evaluated - expected) / expected,
        "gathered": {kind: counted for (kind, _), counted in messages.counts.items()}.get("all_gather"),
        "tied": model.get_input_embeddings().weight is model.get_output_embeddings().weight,
        **side_by_side(
            model,
            plain,
            lambda model, step: loss_of(model, name, step),
            state=partial(whole_state, layout=layout, group=mesh.get_group()),
            lr=0.1,
        ),
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("gpt2", 2),
        ("t5", 4),
        pytest.param("llama", 2, marks=pytest.mark.nightly),
        pytest.param("untied", 4, marks=pytest.mark.nightly),
    ],
)
def test_trains_as_the_whole_model_without_gathering_logits(pool: Pool, name: str, ranks: int) -> None:
    for seen in pool.run(trained, name, {}, ranks=ranks):
        assert max(seen["loss"], seen["evaluated"]) <= 1e-5
        assert seen["update"] <= 1e-4
        assert seen["gathered"] == (1, ranks * 2 * FLOAT * BATCH * SEQ)  # two numbers a row, from every rank
        assert seen["tied"] == (name in ("llama", "t5"))


def test_logits_can_be_gathered_where_they_are_made(pool: Pool) -> None:
    for seen in pool.run(trained, "llama", {"loss_parallel": False}):
        assert max(seen["loss"], seen["evaluated"]) <= 1e-5
        assert seen["update"] <= 1e-4
        assert seen["gathered"] == (1, FLOAT * BATCH * SEQ * SIZES["vocab_size"])


ROWS, WIDTH, PADDING = 7, 6, 5


class Tied(nn.Module):
    """Embedding and logits on one table, with a token for padding, and a bias; a table of another size."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.tokens = nn.Embedding(ROWS, WIDTH, padding_idx=PADDING, **settings)
        self.places = nn.Embedding(ROWS + 2, WIDTH)
        self.blocks = nn.Sequential(Block(WIDTH), Block(WIDTH))
        self.logits = nn.Linear(WIDTH, ROWS)
        self.logits.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        return self.logits(self.blocks(x))


def run(model: nn.Module) -> Any:
    return model(torch.arange(ROWS)[None].repeat(2, 1))


RENORMED = [("tokens.weight", "max_norm and scale_grad_by_freq need the whole table")]


@pytest.mark.parametrize(
    ("settings", "held", "cut", "kept"),
    [({}, (4, 3), ["logits.weight", "tokens.weight"], []), ({"max_norm": 100.0}, (ROWS, ROWS), [], RENORMED)],
)
@on_ranks()
def test_a_tied_table_is_cut_once_and_one_that_is_renormed_stays_whole(
    rank: int, size: int, settings: dict[str, Any], held: tuple[int, int], cut: list[str], kept: list[tuple[str, str]]
) -> None:
    model = Tied(**settings)
    plain = copy.deepcopy(model)
    layout = tensor_parallel(model, run, mesh_of(size))
    weights = torch.arange(2.0 * ROWS * ROWS).view(2, ROWS, ROWS).sin()
    state = partial(whole_state, layout=layout)
    assert model.logits.weight is model.tokens.weight
    assert getattr(model.tokens.weight, "to_local", lambda: model.tokens.weight)().shape[0] == held[rank]
    assert sorted(name for name in layout.rows if "blocks" not in name) == cut
    assert [(each.name, each.reason) for each in layout.kept] == kept
    found = side_by_side(model, plain, lambda model, _: (run(model) * weights).mean(), state=state)
    assert found["update"] < 1e-4
