"""fp8 as a method: the documented configuration, where it can run, and what it says."""

from __future__ import annotations

import logging
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest

from atorch.auto.job import make_context
from atorch.auto.opt_lib.fp8 import Fp8
from atorch.auto.strategy import Strategy
from atorch.cluster.spec import ClusterSpec
from atorch.cost import Cost
from atorch.distributed.world import init
from atorch.errors import CapabilityError, StrategyError
from atorch.logs import logger
from tests.auto.opt_lib import splitting
from tests.auto.training import messages, run_each
from tests.contract.job import arguments, deviation, make_model
from tests.pool import Pool


def cluster(kind: str, capability: tuple[int, int] | None = None) -> ClusterSpec:
    plain = splitting.cluster(kind=kind)
    return replace(plain, device=replace(plain.device, capability=capability))


def apply(config: Any) -> Any:
    model = make_model()
    Fp8.of(config).apply(make_context(model, **arguments(), world=init(), cluster=cluster("cpu")))
    return model


def test_hardware_and_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atorch.runtime.precision.fp8.find_spec", lambda name: object())
    assert Fp8().unmet(cluster("cuda", (8, 0))) == "fp8 needs compute capability 8.9; this is 8.0"
    assert Fp8().unmet(cluster("cuda", (9, 0))) is None
    assert "this is cpu" in (Fp8().unmet(cluster("cpu")) or "")
    assert Fp8(emulate=True).unmet(cluster("cpu")) is None
    assert Fp8(emulate=True).unmet(cluster("cuda", (8, 0))) is None
    monkeypatch.setattr("atorch.runtime.precision.fp8.find_spec", lambda name: None)
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


def split_deviation(rank: int, size: int, axes: Any, name: str) -> tuple[float, list[str]]:
    """The deviation from plain training, and log lines about fp8."""
    fp8 = ("fp8", {"backend": "torchao", "emulate": True, "exclude": ["lm_head"]})
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
