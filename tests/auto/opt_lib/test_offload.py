"""offload: trained bit for bit as without, what it leaves on the device, worked by hand, and what does not hold."""

import pytest
import torch

from atorch import auto_accelerate, clip_grad_norm
from atorch.auto.job import make_context
from atorch.auto.opt_lib.offload import Offload
from atorch.auto.strategy import Strategy
from atorch.cost import peak_memory
from atorch.distributed.world import init
from atorch.errors import StrategyError
from tests.auto.opt_lib.splitting import PROFILE, cluster, cost_of
from tests.auto.training import run_each, steps
from tests.contract.job import arguments, distance, make_model, snapshot, updates


def held(**shares):
    memory = peak_memory(cost_of({"data": 2}, "ddp", ("offload", shares)))
    return memory.parameters, memory.gradients, memory.optimizer, memory.activations, memory.on_host


ACTIVATIONS = 8 / 2 * (800 + 8 * 5000)


def test_shares_wait_on_the_host():
    copies = 2 * 54_400  # of parameters, and gradients while they are stepped
    assert held() == (54_400, 54_400, 0, ACTIVATIONS, 108_800 + copies)
    assert held(parameters=0.5) == (27_200, 27_200, 0, ACTIVATIONS, 108_800 + 54_400 + copies / 2)
    block = 8 / 2 * 5000
    assert held(optimizer=0.0, activations=0.5) == (54_400, 54_400, 108_800, ACTIVATIONS - 4 * block, 4 * block)
    assert held(optimizer=0.0, activations=0.49) == (54_400, 54_400, 108_800, ACTIVATIONS - 3 * block, 3 * block)
    assert held(optimizer=0.0, activations=1.0)[-1] == 7 * block  # the last keeps its own

    # With gradients of their own place, the last block's backward has as much of all else as that of the first.
    cost = cost_of({}, ("offload", {"optimizer": 0.0, "activations": 1.0})).but(grads_persist=True, step_itemsize=0.0)
    block = 16 / 2 * 5000
    assert peak_memory(cost).activations == 16 / 2 * 800 + 2 * block

    cost = cost_of({"pipeline": 4}, "pipeline_parallel", ("offload", {"activations": 1.0}))
    assert (cost.activation_offload, cost.activations_ahead) == (0.5, 0.5)  # one of two goes, and comes back
    alone = cost_of({"pipeline": 8}, "pipeline_parallel", ("offload", {"activations": 1.0}))
    assert alone.activation_offload == 0, "a lone block's are back at once, but for those of other micro-batches"

    plain = cost_of({"data": 2}, "ddp")
    assert "no whole block of 8" in Offload(activations=0.1).unfit(plain)
    assert Offload(activations=0.125).unfit(plain) is None

    shares = [(each.parameters, each.optimizer, each.activations) for each in Offload.choices(PROFILE, cluster())]
    assert shares == [(0, 1, 0), (1, 1, 0), (0, 0, 1), (1, 1, 1)]
    assert not list(Offload.choices(PROFILE, cluster(kind="cpu")))


def test_shards_wait_as_shards():
    memory = peak_memory(cost_of({"data": 2}, "zero1", ("offload", {"optimizer": 1.0})))
    assert (memory.parameters, memory.gradients, memory.optimizer) == (54_400, 54_400, 0)
    assert memory.on_host == 2 * 54_400 / 2 + 2 * 54_400 / 2

    memory = peak_memory(cost_of({"data": 2}, "fsdp", ("offload", {"parameters": 1.0})))
    assert (memory.parameters, memory.gradients, memory.optimizer) == (0, 0, 0)
    assert memory.transient > 0
    assert memory == peak_memory(cost_of({"data": 2}, ("fsdp", {"cpu_offload": True})))

    cost = cost_of({"data": 2}, ("chunk", {"budget_bytes": 10**9}))
    assert "chunk decides" in Offload().unfit(cost)
    assert Offload(optimizer=0.0, activations=1.0).unfit(cost) is None
    assert Offload().unfit(cost_of({"data": 2}, "fsdp")) is None

    assert Offload(parameters=0.5).needs == ("fsdp",)
    assert Offload().needs == ()


@pytest.mark.parametrize(
    ("shares", "told"),
    [
        ({"optimizer": 0.0, "activations": 1.0}, "activations offloaded"),
        ({}, "optimizer offloaded"),
        ({"parameters": 1.0, "activations": 0.25}, "parameters, optimizer, 25% of activations offloaded"),
    ],
)
def test_it_says_what_waits(shares, told):
    assert str(Offload(**shares)) == told


def clipping(model):
    return clip_grad_norm(model, 0.5)


def trained(strategy):
    """Updates and the optimizer's state of AdamW, clipped and scheduled."""
    model = make_model()
    before = snapshot(model)
    _, result, _ = auto_accelerate(
        model,
        load_strategy=strategy,
        lr_scheduler_cls=torch.optim.lr_scheduler.StepLR,
        lr_scheduler_args={"step_size": 1, "gamma": 0.5},
        **arguments(optim_func=torch.optim.AdamW, optim_args={"lr": 1e-2}),
    )
    device, norms = next(result.model.parameters()).device, []
    for batch in result.dataloader:
        norms += steps(result.model, result.optim, result.loss_func, [result.prepare_input(batch, device)], clipping)[1]
        result.lr_scheduler.step()
    return updates(before, snapshot(result.model)), norms, result.optim.state_dict()


def as_without(rank, size, beside, shares):
    (got, norms, saved), (expected, expected_norms, expected_saved) = (
        trained(strategy) for strategy in ([*beside, ("offload", shares)], [*beside])
    )
    same_state = [entry.keys() for entry in saved["state"].values()] == [
        entry.keys() for entry in expected_saved["state"].values()
    ]
    return distance(got, expected), norms == expected_norms, same_state


def test_training_with_adam_clipping_and_a_schedule_is_the_same_bit_for_bit(pool):
    cases = [
        (["ddp"], {"optimizer": 0.6, "activations": 1.0}),
        (["zero1", ("half", "bf16")], {}),
        (["fsdp", ("half", "bf16")], {"parameters": 0.5}),
    ]
    assert run_each(pool, as_without, cases) == [[(0, True, True)] * 2] * len(cases)


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (["half", ("offload", {"parameters": 1.0})], "add fsdp, or take chunk"),
        (["half", "zero2", ("offload", {"parameters": 1.0})], "add fsdp, or take chunk"),
        (["chunk", "offload"], "give it activations alone"),
        ([("zero1", {"backend": "fairscale"}), "offload"], "leave the backend of zero1 out"),
    ],
)
def test_what_cannot_be_beside_it_is_refused_with_the_model_as_it_was(strategy, message):
    model = make_model()
    with pytest.raises(StrategyError, match=message):
        Strategy.of(strategy).apply(make_context(model, **arguments(), world=init(), cluster=cluster(kind="cpu")))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert not any("forward" in vars(module) for module in model.modules())


def test_what_it_has_nothing_to_do_with_is_refused():
    ctx = make_context(torch.nn.Linear(2, 2), **arguments(), world=init(), cluster=cluster(kind="cpu"))
    with pytest.raises(StrategyError, match="0 repeated blocks .* give a model that repeats blocks"):
        Offload(activations=1.0).apply(ctx)

    ctx = make_context(make_model(), **arguments(optim_func=None, optim_args=None), world=init(), cluster=cluster())
    with pytest.raises(StrategyError, match="give optim_func"):
        Offload().apply(ctx)
