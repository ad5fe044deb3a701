"""torch.distributed.checkpoint finds every parameter and state of an accelerated model by the user's names."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from atorch import whole_state
from atorch.errors import ArgumentError, CheckpointError
from tests.auto.opt_lib.sharing_job import accelerated
from tests.auto.training import accelerate, run_each
from tests.language_models import gpt2
from tests.pool import Pool
from tests.runtime.sharing import make


def step(result: Any) -> float:
    return float(result.step(next(iter(result.dataloader))))


SHARDED: dict[str, bool] = {}
FLAT = {"flatten_optimizer_state_dict": True}
WHOLE = {"full_state_dict": True}
ON_ONE = {"full_state_dict": True, "cpu_offload": True}


def resumed(rank: int, size: int, strategy: list[Any], options: dict[str, bool]) -> tuple[list[float], list[float]]:
    """The losses of three steps after two, and those of a fresh job that loads what was stored after two.

    What is stored has every value and every state by the names of the plain model.
    """
    arguments: dict[str, Any] = {"optim_func": torch.optim.AdamW, "optim_param_func": None}
    result = accelerated(strategy, "awkward", **arguments)
    step(result)
    step(result)
    stored = copy.deepcopy(get_state_dict(result.model, result.optim, options=StateDictOptions(**options)))
    plain = make("awkward")
    if options == SHARDED:
        trained = {name for name, parameter in plain.named_parameters() if parameter.requires_grad}
        assert stored[0].keys() == plain.state_dict().keys()
        assert stored[1]["state"].keys() == trained
    expected = [step(result) for _ in range(3)]
    fresh = accelerated(strategy, "awkward", seed=1, **arguments)
    if options == ON_ONE:
        assert bool(stored[0]) == bool(stored[1]) == (rank == 0)  # the other processes get theirs from it
        options = {"full_state_dict": True, "broadcast_from_rank0": True}
    set_model_state_dict(fresh.model, stored[0], options=StateDictOptions(**options))
    set_optimizer_state_dict(fresh.model, fresh.optim, stored[1], options=StateDictOptions(**options))
    return expected, [step(fresh) for _ in range(3)]


HALF, AMP = ("half", "bf16"), ("amp_native", "bf16")
CASES = [(["zero1"], FLAT), (["zero1"], ON_ONE), (["zero1", HALF], WHOLE), (["fsdp"], ON_ONE)]
CASES += [(["zero1", HALF], FLAT), (["ddp", "offload"], FLAT)]
CASES += [(strategy, SHARDED) for strategy in (["ddp", AMP, ("micro_batch", {"size": 2})], ["zero2"], ["fsdp", HALF])]
MORE = [(strategy, options) for strategy in (["ddp"], ["zero1"], ["zero2"]) for options in (SHARDED, WHOLE, ON_ONE)]


@pytest.mark.parametrize("cases", [CASES, pytest.param(MORE, marks=pytest.mark.nightly)], ids=["few", "more"])
def test_a_fresh_job_goes_on_from_what_torch_stored(pool: Pool, cases: list[Any]) -> None:
    for case, by_rank in zip(cases, run_each(pool, resumed, cases), strict=True):
        for expected, got in by_rank:
            assert got == expected, case


TENSOR: list[Any] = [("parallel_mode", [("tensor", 2)]), "tensor_parallel"]


def loaded_by_all(rank: int, size: int, strategy: list[Any], folder: str) -> str:
    """The error where every process loads what the first one saved, after each has loaded its own."""
    result = accelerated(strategy, "llama")
    torch.save(result.model.state_dict(), f"{folder}/{rank}.pt")
    saved = whole_state(result.model)
    fresh = accelerated(strategy, "llama", seed=1)
    fresh.model.load_state_dict(torch.load(f"{folder}/{rank}.pt", weights_only=True))
    assert all(torch.equal(saved[name], value) for name, value in whole_state(fresh.model).items())
    try:
        fresh.model.load_state_dict(torch.load(f"{folder}/0.pt", weights_only=True))
    except CheckpointError as error:
        return str(error)
    return ""


def test_a_process_refuses_the_part_of_another(pool: Pool, tmp_path: Path) -> None:
    for strategy in (["fsdp"], TENSOR):
        first, second = pool.run(loaded_by_all, strategy, str(tmp_path))
        assert first == ""
        assert "another part of the model" in second


DROPOUTS = ("resid_pdrop", "embd_pdrop", "attn_pdrop")


def tokens() -> torch.Tensor:
    return torch.arange(6) * torch.arange(1, 9)[:, None] % 32


def language_job(strategy: list[Any]) -> Any:
    """The result of auto_accelerate on a GPT-2, which has fused projections."""
    torch.manual_seed(0)
    model, data = gpt2(32, 16, heads=2, positions=8, **dict.fromkeys(DROPOUTS, 0)), tokens().split(1)
    samples = [{"input_ids": sample[0], "labels": sample[0]} for sample in data]
    more = {"model_input_format": "unpack_dict", "optim_func": torch.optim.AdamW}
    return accelerate(model, strategy, samples, lambda batch, output: output.loss, batch_size=4, **more)


def refused_by_torch(rank: int, size: int, strategy: list[Any], folder: str) -> None:
    result = language_job(strategy)
    step(result)
    model, optim = get_state_dict(result.model, result.optim)
    with pytest.raises(dcp.CheckpointException, match="would take this process's part"):
        dcp.save({"model": model, "optim": copy.deepcopy(optim)}, checkpoint_id=folder)


def test_parts_that_torch_would_take_for_the_whole_are_refused(pool: Pool, tmp_path: Path) -> None:
    chunk: list[Any] = [("chunk", {"budget_bytes": 2**22})]
    run_each(pool, refused_by_torch, [(strategy, str(tmp_path)) for strategy in (TENSOR, chunk)])
    both = [("parallel_mode", [("tensor", 2), ("data", 2)]), "tensor_parallel", "fsdp"]
    pool.run(refused_by_torch, both, str(tmp_path), ranks=4)


def saved_for_hugging_face(rank: int, size: int, strategy: list[Any], folder: str) -> tuple[str, float, float]:
    """(the error without a state, the loss of the model, that of the one read back)."""
    result = language_job(strategy)
    with pytest.raises(ArgumentError) as refusal:
        result.model.save_pretrained(folder)
    state = whole_state(result.model)
    if rank == 0:
        result.model.save_pretrained(folder, state_dict=state)
    batch = {"input_ids": tokens()[:4], "labels": tokens()[:4]}
    with torch.no_grad():
        loss = float(result.model(**batch).loss)
        read = float(type(gpt2()).from_pretrained(folder)(**batch).loss) if rank == 0 else loss
    return str(refusal.value), loss, read


def test_hugging_faces_files_have_the_whole_model(pool: Pool, tmp_path: Path) -> None:
    cases = [(strategy, str(tmp_path / str(number))) for number, strategy in enumerate((["fsdp"], TENSOR))]
    for (refusal, loss, read), _ in run_each(pool, saved_for_hugging_face, cases):
        assert "state = atorch.whole_state(result.model)" in refusal
        assert read == pytest.approx(loss, rel=1e-6)
