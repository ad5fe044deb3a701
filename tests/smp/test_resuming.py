"""Training that goes on from a checkpoint, at the degree that saved it and at another, also in 16 bits."""

import copy
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import atorch.smp as smp
from atorch.smp.session import session
from tests.auto.training import run_each
from tests.pool import Pool
from tests.smp.job import MICROBATCHES, batch_of, begun, made, train_step
from tests.smp.test_step import WIDTH, Blocks, train

STEPS = 4


def split_and_wrapped() -> tuple[Any, Any]:
    torch.manual_seed(0)
    whole = Blocks()
    smp.set_tensor_parallelism(whole)
    model = smp.DistributedModel(whole)
    return model, smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.05))


def losses_of(model: Any, optimizer: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        batch = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        losses.append(float(train(model, batch).reduce_mean()))
        optimizer.step()
    return losses


def first_half(rank: int, size: int, path: str, config: dict[str, Any]) -> list[float]:
    with begun(config):
        model, optimizer = split_and_wrapped()
        losses = losses_of(model, optimizer, range(2))
        smp.save_checkpoint(path, "two", model=model, optimizer=optimizer, user_content={"step": 2})
        smp.save_checkpoint(path, "whole", partial=False, model=model)
        state = {"model": model.local_state_dict(), "optimizer": optimizer.local_state_dict()}
        if smp.rdp_rank() == 0:
            smp.save(state, f"{path}/by_hand.pt")
        smp.barrier()
        return losses + losses_of(model, optimizer, range(2, STEPS))


def second_half(rank: int, size: int, path: str, config: dict[str, Any], way: str) -> list[float]:
    with begun(config):
        model, optimizer = split_and_wrapped()
        if way == "late":  # once the model is partitioned
            losses_of(model, optimizer, range(10, 11))
        if way == "by hand":
            state = smp.load(f"{path}/by_hand.pt")
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            return losses_of(model, optimizer, range(2, STEPS))
        content = smp.resume_from_checkpoint(path)
        return losses_of(model, optimizer, range(content["step"], STEPS))


CONFIGS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {"microbatches": 2}),
    "two stages": (2, {"partitions": 2, "microbatches": 2}),
    "two slices": (2, {"tensor_parallel_degree": 2, "ddp": True, "prescaled_batch": True, "microbatches": 2}),
    "two shards": (2, {"ddp": True, "sharded_data_parallel_degree": 2, "microbatches": 2, "sdp_gradient_clipping": 0}),
    "two states": (2, {"ddp": True, "shard_optimizer_state": True, "microbatches": 2}),
}
SAMPLE = [("two stages", "one", "late"), ("two slices", "two stages", "early"), ("two shards", "one", "by hand")]


@pytest.mark.parametrize(
    ("before", "after", "way"),
    [
        pytest.param(*case, marks=[] if case in SAMPLE else pytest.mark.nightly)
        for case in itertools.product(CONFIGS, CONFIGS, ("early", "late", "by hand"))
    ],
)
def test_training_goes_on_as_if_it_had_not_ended(pool: Pool, tmp_path: Path, before: str, after: str, way: str) -> None:
    """Losses after the checkpoint are those of training that went on."""
    path = str(tmp_path)
    ranks, config = CONFIGS[before]
    right = pool.run(first_half, path, config, ranks=ranks)[0][2:]
    ranks, config = CONFIGS[after]
    for losses in pool.run(second_half, path, config, way, ranks=ranks):
        assert losses == pytest.approx(right, rel=1e-5)


SAVED_AT, LAST = 2, 4


def resumed(rank: int, size: int, config: Mapping[str, Any], is_partial: bool, path: str = "") -> float:
    """Distance of a model that was trained on from a saved state from the one that was trained on by itself.

    path: of the optimizer's file, as Hugging Face's Trainer saves and loads it; or it has none.
    """
    saved, first = _run(config, is_partial, None, path)
    _, second = _run(config, is_partial, saved, path)
    assert first[1] == second[1], "the loss scale"
    return max(float((one.float() - second[0][name].float()).abs().max()) for name, one in first[0].items())


def _run(config: Mapping[str, Any], is_partial: bool, saved: Any, path: str) -> Any:
    with begun({"microbatches": MICROBATCHES, "ddp": True, **config}):
        model = smp.DistributedModel(made("gpt2"))
        adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
        optimizer = smp.DistributedOptimizer(adamw, dynamic_loss_scale=True, init_scale=2.0**12, scale_window=SAVED_AT)
        replica = session().mesh.rank("data", "zero")
        if saved is not None:
            model.load_state_dict(saved[0], same_partition_load=is_partial)
            if path:
                model.register_post_step_hook(lambda _, given: given.load_state_dict(smp.load(path, back_compat=True)))
            else:
                optimizer.load_state_dict(saved[1])
        for step in range(0 if saved is None else SAVED_AT, LAST):
            if step == SAVED_AT and saved is None:
                now = (
                    (model.local_state_dict(), optimizer.local_state_dict(gather_if_shard=False))
                    if is_partial
                    else (model.state_dict(gather_to_rank0=True), optimizer.state_dict())
                )
                saved = copy.deepcopy(now)
                if path:
                    smp.save(saved[1], path, partial=True, v3=smp.state.cfg.shard_optimizer_state)
            optimizer.zero_grad()
            train_step(model, "gpt2", *batch_of("gpt2", step, replica), "mean")
            optimizer.step()
        return saved, (copy.deepcopy(model.state_dict()), optimizer.loss_scale)


SHARDED = {"sharded_data_parallel_degree": 2}
STATES = {"shard_optimizer_state": True}
FP16 = {"fp16": True}


def test_what_was_saved_goes_on_as_it_was(pool: Pool, tmp_path: Path) -> None:
    """Whole, in parts, and, as Hugging Face's Trainer does, with the optimizer's file, which a hook loads."""
    path = str(tmp_path / "optimizer.pt")
    ways: list[tuple[Any, ...]] = [
        (FP16, False),
        ({**SHARDED, **FP16}, True),
        (STATES, False),
        ({**STATES, **FP16}, True, path),
    ]
    ways.append(({"bf16": True, "partitions": 2}, False))
    assert run_each(pool, resumed, ways) == [[0.0, 0.0]] * len(ways)
    assert [path.name for path in tmp_path.iterdir()] == ["optimizer.pt_0"]
