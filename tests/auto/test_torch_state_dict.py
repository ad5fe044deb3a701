"""torch.distributed.checkpoint finds every parameter and state of an accelerated model by the user's names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

from tests.auto.opt_lib.sharing_job import accelerated
from tests.pool import Pool
from tests.runtime.sharing import make


def whole(value: Any) -> Any:
    value = value.full_tensor() if isinstance(value, DTensor) else value
    return value.clone() if isinstance(value, torch.Tensor) else value


def step(result: Any) -> None:
    batch = result.prepare_input(next(iter(result.dataloader)), torch.device("cpu"))
    result.loss_func(batch, result.model(batch)).backward()
    result.optim.step()
    result.optim.zero_grad()


def stored_and_loaded(rank: int, size: int, strategy: list[Any]) -> tuple[set[str], set[str], bool]:
    """(names of parameters, names with states, whether all is as it was stored after another step was taken)."""
    result = accelerated(strategy, "awkward", optim_func=torch.optim.AdamW, optim_param_func=None)
    step(result)
    model_state, optim_state = get_state_dict(result.model, result.optim)
    model_state = {name: value.clone() for name, value in model_state.items()}
    stored = {name: whole(value) for name, value in model_state.items()}
    moments = {name: whole(state["exp_avg"]) for name, state in optim_state["state"].items()}
    optim_state["state"] = {
        name: {key: value.clone() for key, value in state.items()} for name, state in optim_state["state"].items()
    }
    step(result)
    set_state_dict(result.model, result.optim, model_state_dict=model_state, optim_state_dict=optim_state)
    model_state, optim_state = get_state_dict(result.model, result.optim)
    same = all(torch.equal(whole(model_state[name]), value) for name, value in stored.items())
    same &= all(torch.equal(whole(optim_state["state"][name]["exp_avg"]), value) for name, value in moments.items())
    return set(stored), set(moments), same


@pytest.mark.parametrize(
    "strategy",
    [["ddp"], ["ddp", ("amp_native", "bf16"), ("micro_batch", {"size": 2})], ["zero2"], ["fsdp", ("half", "bf16")]],
    ids=["ddp", "ddp+amp+micro_batch", "zero2", "fsdp+half"],
)
def test_what_torch_stores_it_loads(pool: Pool, strategy: list[Any]) -> None:
    plain = make("awkward")
    trained = {name for name, parameter in plain.named_parameters() if parameter.requires_grad}
    for names, with_states, same in pool.run(stored_and_loaded, strategy):
        assert names == set(plain.state_dict())
        assert with_states == trained
        assert same
