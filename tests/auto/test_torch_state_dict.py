"""torch.distributed.checkpoint finds every parameter and state of an accelerated model by the user's names."""

import copy
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from atorch import whole_state
from atorch.errors import ArgumentError, CheckpointError
from tests.auto.opt_lib.sharing_job import accelerated
from tests.auto.training import accelerate, run_each
from tests.language_models import gpt2
from tests.pool import Pool, on_ranks
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


@pytest.mark.parametrize("options", [{}, FLAT], ids=["nested", "flat"])
def test_the_loss_scale_comes_back(options: dict[str, bool]) -> None:
    first, second = (
        accelerated([("amp_native", {"dtype": "fp16", "init_scale": scale})], "awkward") for scale in (1024.0, 16.0)
    )
    step(first)
    chosen = StateDictOptions(**options)
    states = get_optimizer_state_dict(first.model, first.optim, options=chosen)
    set_optimizer_state_dict(second.model, second.optim, states, options=chosen)
    assert second.optim.state_dict()["loss_scale"] == first.optim.state_dict()["loss_scale"]
    assert second.optim.state_dict()["loss_scale"]["scale"] > 16


def from_half(rank: int, size: int, strategy: list[Any]) -> None:
    """fp32 parameters get the masters; without these a state is refused, and fp32 is rounded once."""
    half = accelerated([HALF, *strategy], "awkward", optim_func=torch.optim.AdamW)
    step(half)
    stored = copy.deepcopy((half.model.state_dict(), half.optim.state_dict(), get_state_dict(half.model, half.optim)))
    for model, optim in (stored[:2], stored[2]):
        fresh = accelerated(strategy, "awkward", seed=1, optim_func=torch.optim.AdamW)
        step(fresh)
        fresh.model.load_state_dict(model)
        if optim is stored[1]:
            fresh.optim.load_state_dict(optim)
        else:
            set_optimizer_state_dict(fresh.model, fresh.optim, copy.deepcopy(optim))
        for name, entry in stored[2][1]["state"].items():
            assert torch.equal(whole_state(fresh.model)[name], full(entry["master"]))
            assert not torch.equal(full(entry["master"]), full(model[name]).float())
    for entry in optim["state"].values():
        del entry["master"]
    flat = StateDictOptions(**FLAT)
    with pytest.raises(CheckpointError, match="a job under half, and its fp32 masters are left out"):
        set_optimizer_state_dict(fresh.model, fresh.optim, optim)
    optim = get_optimizer_state_dict(half.model, half.optim, options=flat)
    with pytest.raises(CheckpointError, match="a job under half, and its fp32 masters are left out"):
        set_optimizer_state_dict(fresh.model, fresh.optim, optim, options=flat)
    half.model.load_state_dict(fresh.model.state_dict())
    half.optim.load_state_dict(fresh.optim.state_dict())
    step(half)


def full(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def test_masters_in_a_state_become_the_values_of_fp32_parameters(pool: Pool) -> None:
    from_half(0, 1, [])
    from_half(0, 1, ["offload"])
    half, fresh = (accelerated(strategy, "awkward", optim_func=torch.optim.AdamW) for strategy in ([HALF], CHUNK))
    step(half)
    fresh.model.load_state_dict(half.model.state_dict())
    fresh.optim.load_state_dict(half.optim.state_dict())
    for name, entry in get_optimizer_state_dict(half.model, half.optim)["state"].items():
        assert torch.equal(fresh.model.state_dict()[name], entry["master"])
    run_each(pool, from_half, [(["ddp"],), (["zero1"],), (["fsdp"],)])


TENSOR: list[Any] = [("parallel_mode", [("tensor", 2)]), "tensor_parallel"]


def loaded_by_all(rank: int, size: int, strategy: list[Any], folder: str) -> str:
    """The error where every process loads what the first one saved, after each has loaded its own."""
    result = accelerated(strategy, "llama")
    step(result)
    torch.save((result.model.state_dict(), result.optim.state_dict()), f"{folder}/{rank}.pt")
    saved = whole_state(result.model)
    fresh = accelerated(strategy, "llama", seed=1)
    fresh.model.load_state_dict(torch.load(f"{folder}/{rank}.pt", weights_only=True)[0])
    assert all(torch.equal(saved[name], value) for name, value in whole_state(fresh.model).items())
    model, optim = torch.load(f"{folder}/0.pt", weights_only=True)
    errors = set()
    for load, state in ((fresh.model.load_state_dict, model), (fresh.optim.load_state_dict, optim)):
        try:
            load(state)
            errors.add("")
        except CheckpointError as error:
            errors.add(str(error))
    (error,) = errors
    return error


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


def plain_states(**options: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """The states, as torch saves them, of the same GPT-2 on one process."""
    model = gpt2(32, 16, heads=2, positions=8)
    optim = torch.optim.AdamW(model.parameters())
    model(input_ids=tokens(), labels=tokens()).loss.backward()
    optim.step()
    return model.state_dict(), get_optimizer_state_dict(model, optim, options=StateDictOptions(**options))


CHUNK: list[Any] = [("chunk", {"budget_bytes": 2**22})]
BOTH: list[Any] = [("parallel_mode", [("tensor", 2), ("data", 2)]), "tensor_parallel", "fsdp"]
STAGES: list[Any] = [("parallel_mode", [("pipeline", 2)]), ("pipeline_parallel", {"micro_batches": 2})]
MIXED: list[Any] = [("parallel_mode", [("tensor", 2), ("pipeline", 2)]), "mixed_parallel"]


@pytest.mark.parametrize(
    ("strategy", "size"),
    [(TENSOR, 2), (CHUNK, 2), *(pytest.param(each, 4, marks=pytest.mark.slow) for each in (BOTH, MIXED))],
)
@on_ranks(None)
def test_parts_that_torch_would_take_for_the_whole_are_refused(
    rank: int, size: int, strategy: list[Any], tmp_path: Path
) -> None:
    result = language_job(strategy)
    step(result)
    model, optim = get_state_dict(result.model, result.optim)
    states = {"optim": copy.deepcopy(optim)}
    for save in (dcp.save, dcp.async_save):
        for saved in (states, {"optim": result.optim.state_dict()}, {"model": model, **states}):
            with pytest.raises((dcp.CheckpointException, CheckpointError), match="would take this process's part"):
                save(saved, checkpoint_id=tmp_path)
    if strategy == CHUNK:
        with pytest.raises(ArgumentError, match="is kept for a copy or parts of it"):
            set_optimizer_state_dict(
                result.model, result.optim, plain_states(**FLAT)[1], options=StateDictOptions(**FLAT)
            )


def refuses_whole(result: Any) -> None:
    for get in (get_model_state_dict, partial(get_optimizer_state_dict, optimizers=result.optim)):
        with pytest.raises(CheckpointError, match="would take this process's part"):
            get(result.model, options=StateDictOptions(full_state_dict=True))


@pytest.mark.parametrize(("strategy", "size"), [(STAGES, 2), pytest.param(MIXED, 4, marks=pytest.mark.slow)])
@on_ranks(None)
def test_a_stage_is_not_taken_for_the_whole(rank: int, size: int, strategy: list[Any], tmp_path: Path) -> None:
    """A stage's part is not the whole, and another process's states are refused; the whole model's are taken."""
    result, fresh = language_job(strategy), language_job(strategy)
    step(result)
    refuses_whole(result)
    own, whole = (result.model.state_dict(), result.optim.state_dict()), whole_state(result.model)
    of_first: list[Any] = [own]
    dist.broadcast_object_list(of_first)
    for load, state in zip((fresh.model.load_state_dict, fresh.optim.load_state_dict), of_first[0], strict=True):
        with (
            nullcontext() if rank == 0 else pytest.raises((RuntimeError, CheckpointError), match="Missing|another part")
        ):
            load(copy.deepcopy(state))
    if strategy == STAGES:
        states = get_optimizer_state_dict(result.model, result.optim)
        dcp.save(states, checkpoint_id=tmp_path)
        dcp.load(states, checkpoint_id=tmp_path)
        with nullcontext() if rank else pytest.raises(CheckpointError, match="no settings for this process's param"):
            set_optimizer_state_dict(fresh.model, fresh.optim, states)
        fresh.model.load_state_dict(whole)
    else:
        with pytest.raises(CheckpointError, match="was given whole tensors"):
            fresh.model.load_state_dict(whole)
        fresh.model.load_state_dict(own[0])
    for name, value in whole_state(fresh.model).items():
        assert torch.equal(value, whole[name]), name


@pytest.mark.parametrize(("strategy", "size"), [(TENSOR, 2), pytest.param(BOTH, 4, marks=pytest.mark.slow)])
@on_ranks(None)
def test_torchs_whole_states_do_not_take_rows_for_others(rank: int, size: int, strategy: list[Any]) -> None:
    """torch's whole states, out of a job and into it, raise; its own states come back."""
    result, fresh = language_job(strategy), language_job(strategy)
    step(result)
    model, optim = plain_states()
    options = StateDictOptions(full_state_dict=True)
    refuses_whole(result)
    with pytest.raises(CheckpointError, match="was given whole tensors"):
        set_model_state_dict(fresh.model, dict(model), options=options)
    with pytest.raises(CheckpointError, match="was given whole tensors"):
        set_optimizer_state_dict(fresh.model, fresh.optim, optim, options=options)
    fresh.model.load_state_dict(result.model.state_dict())
    fresh.optim.load_state_dict(copy.deepcopy(result.optim.state_dict()))
    assert step(fresh) == step(result)
    assert step(fresh) == step(result)


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
