"""fp8 as a method: the documented configuration, where it can run, and what it says."""

import logging
import math
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import atorch
from atorch import auto_accelerate
from atorch.auto.job import make_context
from atorch.auto.opt_lib.fp8 import Fp8
from atorch.auto.opt_lib.fsdp import Fsdp
from atorch.auto.strategy import Strategy
from atorch.cluster.spec import ClusterSpec
from atorch.cost import Cost, plain_cost
from atorch.cost.transformer import TransformerShape, transformer_profile
from atorch.distributed.world import init
from atorch.errors import CapabilityError, StrategyError
from atorch.logs import logger
from atorch.runtime.fsdp.collectives import _AllGather
from tests.auto.opt_lib import splitting
from tests.auto.training import messages, run_each
from tests.contract.job import arguments, deviation, make_model, snapshot, train
from tests.pool import Pool


def cluster(kind: str, capability: tuple[int, int] | None = None) -> ClusterSpec:
    plain = splitting.cluster(kind=kind)
    return replace(plain, device=replace(plain.device, capability=capability))


def apply(config: Any) -> Any:
    model = make_model()
    Fp8.of(config).apply(make_context(model, **arguments(), world=init(), cluster=cluster("cpu")))
    return model


def test_hardware_and_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atorch.runtime.precision.fp8_recipe.find_spec", lambda name: object())
    assert Fp8().unmet(cluster("cuda", (8, 0))) == "fp8 needs compute capability 8.9; this is 8.0"
    assert Fp8().unmet(cluster("cuda", (9, 0))) is None
    assert "this is cpu" in (Fp8().unmet(cluster("cpu")) or "")
    assert Fp8(emulate=True).unmet(cluster("cpu")) is None
    assert Fp8(emulate=True).unmet(cluster("cuda", (8, 0))) is None
    monkeypatch.setattr("atorch.runtime.precision.fp8_recipe.find_spec", lambda name: None)
    with pytest.raises(CapabilityError, match="pip install"):
        Fp8(backend="te").unmet(cluster("cuda", (9, 0)))
    with pytest.raises(StrategyError, match="only torchao emulates"):
        Fp8(backend="te", emulate=True).unmet(cluster("cpu"))


def test_converts_and_tells(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("torchao")
    with caplog.at_level(logging.INFO, "atorch"):
        model = apply({"exclude": ("lm_head",), "emulate": True, "verbose": True})
    assert type(model.model.layers[0].self_attn.q_proj).__name__ == "Float8Linear"
    assert type(model.lm_head).__name__ == "Linear"
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "14 Linear layers of LlamaForCausalLM by torchao, emulated" in caplog.text
    assert "fp8: model.layers.1.mlp.down_proj" in caplog.text
    assert "fp8 leaves lm_head: kept, exclude names it" in caplog.text


EMULATED = {"backend": "torchao", "emulate": True, "exclude": ["lm_head"]}


def split_deviation(rank: int, size: int, axes: Any, name: str) -> tuple[float, list[str]]:
    """The deviation from plain training, and log lines about fp8."""
    fp8 = ("fp8", EMULATED)
    logger.setLevel(logging.INFO)
    with messages() as lines:
        off, _ = deviation(rank, size, [("parallel_mode", (axes, None)), fp8, name], "sdpa")
    return off, [line for line in lines if "fp8 leaves" in line or "no rule" in line]


def test_trains_where_a_process_has_parts_of_weights_or_tokens(pool: Pool) -> None:
    pytest.importorskip("torchao")
    splits = [([(axis, 2)], f"{axis}_parallel") for axis in ("tensor", "sequence", "context")]
    found = run_each(pool, split_deviation, splits)
    for off, told in chain(*found):
        assert 1e-2 < off < 0.1  # products were rounded, and no more than on one process
        assert not any("no rule" in line for line in told)
    lines = found[0][0][1]
    assert any("layers.1.mlp.down_proj, whose parts are not multiples of 16" in line for line in lines)
    assert not any("q_proj" in line for line in lines if "parts are not" in line)


def gathered(rank: int, size: int, axes: Any, *others: Any) -> tuple[list[int], bool]:
    """Bytes that FSDP2 gathers without and with 8-bit gathers, and whether both trainings are equal bit for bit."""
    num_bytes, found, gather = [0, 0], [], _AllGather.__call__

    def count(self: Any, output_tensor: torch.Tensor, **more: Any) -> Any:
        num_bytes[len(found)] += output_tensor.nbytes
        return gather(self, output_tensor, **more)

    for in_fp8 in (False, None):
        fp8 = {**EMULATED, "fsdp_float8_all_gather": in_fp8}
        with patch.object(_AllGather, "__call__", count):
            found.append(train([("parallel_mode", (axes, None)), ("fp8", fp8), *others]))
    (updates, losses), (updates_8, losses_8) = found
    return num_bytes, losses == losses_8 and all(torch.equal(updates[name], updates_8[name]) for name in updates)


AMP, DATA = ("amp_native", "bf16"), [("data", 2)]


def test_shards_gathered_in_8_bits_train_as_whole_weights_do(pool: Pool) -> None:
    pytest.importorskip("torchao")
    cases: list[Any] = [
        (DATA, "fsdp"),
        (DATA, AMP, "fsdp", "checkpoint"),
        (DATA, ("half", "bf16"), "zero2", ("micro_batch", {"count": 2})),
        ([("tensor", 2), ("data", 2)], AMP, "tensor_parallel", "fsdp"),
    ]
    for case in cases:
        for (wide, narrow), are_equal in run_each(pool, gathered, [case], ranks=4 if len(case[0]) > 1 else 2)[0]:
            assert are_equal, case
            assert 0 < narrow < 0.9 * wide, case  # many parts of this small model are no multiples of 16


def saved(rank: int, size: int, folder: str) -> dict[str, torch.Tensor]:
    model, given = make_model(), arguments()
    strategy = [("fp8", {**EMULATED, "fsdp_float8_all_gather": True}), AMP, "fsdp"] if size > 1 else []
    result = auto_accelerate(model, load_strategy=strategy, **given)[1]
    if size > 1:
        assert math.isfinite(float(result.step(next(iter(result.dataloader)))))
        atorch.save_checkpoint(folder, result, 1)
    else:
        atorch.load_checkpoint(folder, result)
    return snapshot(result.model)


def test_checkpoints_hold_weights_in_their_own_dtype(pool: Pool, tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    (trained, _), (loaded,) = (pool.run(saved, str(tmp_path), ranks=ranks) for ranks in (2, 1))
    start = snapshot(make_model())
    for name, value in trained.items():
        assert torch.equal(loaded[name], value), name
        assert not torch.equal(start[name], value), name


@pytest.mark.parametrize(
    ("knobs", "beside", "told"),
    [
        ({"scaling": "rowwise"}, ["fsdp"], "with scaling 'rowwise'"),
        ({}, ["zero1"], "without fsdp or zero2"),
        ({}, [("fsdp", {"reshard_after_forward": 2})], "fsdp's reshard_after_forward=2"),
        ({}, [("fsdp", {"cpu_offload": True})], "parameters in host memory"),
        ({}, ["fsdp", ("offload", {"parameters": 0.5})], "parameters in host memory"),
    ],
)
def test_gathers_in_8_bits_are_refused_by_name_where_they_cannot_be(
    knobs: dict[str, Any], beside: list[Any], told: str
) -> None:
    job = make_context(make_model(), **arguments(), world=init(), cluster=cluster("cpu"))
    ctx = replace(job, strategy=Strategy.of(beside))
    fp8 = Fp8.of({**EMULATED, **knobs})
    fp8.check(ctx)
    with pytest.raises(StrategyError, match=f"fsdp_float8_all_gather=True .*{told}"):
        Fp8.of({**EMULATED, **knobs, "fsdp_float8_all_gather": True}).check(ctx)


def test_gathers_in_8_bits_are_priced_where_they_are() -> None:
    shape = TransformerShape(layers=8, hidden=1024, heads=8, kv_heads=8, head_dim=128, ffn=4096, vocab=8192, seq_len=64)
    profile = transformer_profile(shape)

    def sent(fp8: Fp8, fsdp: Fsdp) -> float:
        plain = plain_cost(profile).replace(dtype="bfloat16", axes={"data": 8})
        cost = fsdp.cost(fp8.cost(plain))
        (gather,) = (comm for comm in cost.comm if comm.kind == "all_gather")
        return gather.num_bytes

    blocks, off = Fp8(include=("layers",)), Fp8(include=("layers",), fsdp_float8_all_gather=False)
    wide = sent(off, Fsdp())
    assert 0.5 < sent(Fp8(), Fsdp()) / wide < sent(blocks, Fsdp()) / wide < 0.6
    assert sent(Fp8(scaling="rowwise"), Fsdp()) == wide
    assert sent(blocks, Fsdp(cpu_offload=True)) == wide
    assert sent(Fp8(backend="te"), Fsdp()) == wide


@pytest.mark.parametrize("name", ["tensor_parallel", "sequence_parallel", "context_parallel", "checkpoint"])
def test_te_is_refused_where_it_has_only_a_part(name: str) -> None:
    job = make_context(make_model(), **arguments(), world=init(), cluster=cluster("cpu"))
    ctx = replace(job, strategy=Strategy.of([name]))
    assert Fp8()._suitable_backend(ctx) == "torchao"
    with pytest.raises(StrategyError, match=f'backend "te" with {name}'):
        Fp8(backend="te")._suitable_backend(ctx)


def test_the_cost_is_that_of_8_bit_products_unless_emulated() -> None:
    plain = Cost(segments=(), traced_batch=1.0, batch_size=1.0)
    assert (Fp8().cost(plain).fp8, Fp8().cost(plain).dtype) == ("tensorwise", plain.dtype)
    assert Fp8(backend="te").cost(plain).fp8 == "delayed"
    assert Fp8(scaling="rowwise_gw_hp").cost(plain).fp8 == "rowwise_gw_hp"
    assert Fp8(emulate=True).cost(plain) == plain
    assert Fp8().cost(plain).fp8_outside
    assert not Fp8(exclude=("lm_head",)).cost(plain).fp8_outside, "a head that is left out costs what it did"
    assert not Fp8(include=("layers",)).cost(plain).fp8_outside
