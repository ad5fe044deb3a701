"""Models whose losses are taken of logits that stay split train as whole ones do, and send a few numbers a row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

from atorch.profiler.memory_tracker import CommCounter
from atorch.runtime.tensor_parallel import tensor_parallel, whole_state
from tests.pool import Pool
from tests.runtime.tensor_parallel.models import SIZES, batch, make
from tests.runtime.tensor_parallel.test_split import distance

STEPS, ROWS, SEQ, FLOAT = 3, 3, 7, 4


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
    before = {key: value.clone() for key, value in plain.state_dict().items()}
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tensor",))
    layout = tensor_parallel(model, run, mesh, as_dtensors=False, **options)
    with torch.no_grad():
        evaluated = float(loss_of(model, name, 0))
    errors: list[float] = []
    sent: list[Any] = []
    for step in range(STEPS):
        losses = []
        for each in (model, plain):
            optim = torch.optim.SGD(each.parameters(), lr=0.1)
            with CommCounter() as messages:
                loss = loss_of(each, name, step)
                loss.backward()
            if each is model:
                sent.append({kind: counted for (kind, _), counted in messages.counts.items()})
            optim.step()
            optim.zero_grad()
            losses.append(loss.item())
        errors.append(abs(losses[0] - losses[1]) / losses[1])
        if step == 0:
            errors.append(abs(evaluated - losses[1]) / losses[1])
    return {
        "loss": max(errors),
        "update": distance(whole_state(model, layout, mesh.get_group()), plain.state_dict(), before),
        "gathered": [each.get("all_gather") for each in sent],
        "tied": model.get_input_embeddings().weight is model.get_output_embeddings().weight,
    }


@pytest.mark.parametrize(
    ("name", "ranks"), [("gpt2", 2), ("llama", 2), ("untied", 4), ("t5", 4)], ids=lambda value: str(value)
)
def test_trains_as_the_whole_model_without_gathering_logits(pool: Pool, name: str, ranks: int) -> None:
    for seen in pool.run(trained, name, {}, ranks=ranks):
        assert seen["loss"] <= 1e-5
        assert seen["update"] <= 1e-4
        # Two numbers a row, from every rank.
        assert seen["gathered"] == [(1, ranks * 2 * FLOAT * ROWS * SEQ)] * STEPS
        assert seen["tied"] == (name in ("llama", "t5"))


def test_logits_can_be_gathered_where_they_are_made(pool: Pool) -> None:
    for seen in pool.run(trained, "llama", {"loss_parallel": False}):
        assert seen["loss"] <= 1e-5
        assert seen["update"] <= 1e-4
        assert seen["gathered"] == [(1, FLOAT * ROWS * SEQ * SIZES["vocab_size"])] * STEPS


def counted(rank: int, size: int) -> dict[str, int]:
    model = make("llama")
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tensor",))
    tensor_parallel(model, run, mesh, as_dtensors=False)
    with CommDebugMode() as comm:
        loss_of(model, "llama", 0).backward()
    return {str(operation): count for operation, count in comm.get_comm_counts().items()}


def test_a_step_has_the_collectives_of_the_textbook(pool: Pool) -> None:
    """Two sums a block in forward and two in backward, one for the table and one for the head; one for the loss."""
    for seen in pool.run(counted):
        assert seen == {"c10d.allreduce_": 2 * (2 + 2) + 1 + 1, "c10d.allgather_": 1}
