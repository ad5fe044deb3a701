"""Runs that go on from what an earlier one has saved."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

import atorch.smp as smp
from atorch.smp.session import session
from tests.smp.job import MICROBATCHES, batch_of, begun, made, train_step

SAVED_AT, LAST = 2, 4


def resumed(rank: int, size: int, config: Mapping[str, Any], is_partial: bool, path: str = "") -> float:
    """How far a model that was trained on from a saved state is from the one that was trained on by itself.

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
