"""Models whose losses are taken of logits that stay split train as whole ones do, and send a few numbers a row."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from atorch.profiler.memory_tracker import CommCounter
from atorch.runtime.tensor_parallel import tensor_parallel, whole_state
from tests.pool import Pool
from tests.runtime.tensor_parallel.models import SIZES, batch, make, side_by_side
from tests.runtime.tensor_parallel.test_split import mesh_of

ROWS, SEQ, FLOAT = 3, 7, 4


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
        own: Tensor = model(**given).loss
        return own
    labels = given.pop("labels")
    return nn.functional.cross_entropy(model(**given).logits.flatten(0, 1), labels.flatten())


def run(model: nn.Module) -> Any:
    return model(**batch("t5" if isinstance(model, transformers.T5ForConditionalGeneration) else "llama"))


def trained(rank: int, size: int, name: str, options: dict[str, Any]) -> dict[str, Any]:
    model, plain = untied(name), untied(name)
    mesh = mesh_of(size)
    layout = tensor_parallel(model, run, mesh, as_dtensors=False, **options)
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
        assert seen["gathered"] == (1, ranks * 2 * FLOAT * ROWS * SEQ)  # two numbers a row, from every rank
        assert seen["tied"] == (name in ("llama", "t5"))


def test_logits_can_be_gathered_where_they_are_made(pool: Pool) -> None:
    for seen in pool.run(trained, "llama", {"loss_parallel": False}):
        assert max(seen["loss"], seen["evaluated"]) <= 1e-5
        assert seen["update"] <= 1e-4
        assert seen["gathered"] == (1, FLOAT * ROWS * SEQ * SIZES["vocab_size"])
