"""The documented configuration: its defaults, where it is read from, what is refused and what has no effect."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from atorch.errors import ArgumentError
from atorch.files.config_dict import NoEffect
from atorch.smp.config import Config
from tests.house.source import ROOT
from tests.house.test_docs import table

DOCUMENTED: dict[str, Any] = {
    "pipeline_parallel_degree": 1, "microbatches": 1, "pipeline": "interleaved", "optimize": "memory",
    "placement_strategy": "cluster", "auto_partition": True, "default_partition": 0, "memory_weight": 0.8, "ddp": False,
    "active_microbatches": 3, "deterministic_server": False, "offload_activations": False,
    "activation_loading_horizon": 4, "tensor_parallel_degree": 1, "fp16": False, "bf16": False,
    "shard_optimizer_state": False, "prescaled_batch": False, "skip_tracing": False, "sharded_data_parallel_degree": 1,
    "sdp_reduce_bucket_size": 5e8, "sdp_param_persistence_threshold": 1e6, "sdp_max_live_parameters": 1e9,
    "sdp_hierarchical_allgather": True, "sdp_gradient_clipping": 1.0, "ddp_dist_backend": "auto", "contiguous": True,
    "horovod": False,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SMP_CONFIG", raising=False)
    monkeypatch.delenv("SM_HP_MP_PARAMETERS", raising=False)


def test_every_documented_key_has_its_documented_default_which_can_be_given_and_not_changed() -> None:
    config = Config.read()
    assert DOCUMENTED.items() <= config.model_dump().items()
    assert Config.read({**DOCUMENTED, "partitions": 1, "fp16_params": False}) == config
    with pytest.raises(ValueError, match="frozen"):
        config.ddp = True  # type: ignore[misc]


@pytest.mark.parametrize(
    ("given", "name", "value"),
    [
        ({"optimize": "speed"}, "memory_weight", 0.2),
        ({"optimize": "memory"}, "memory_weight", 0.8),
        ({"optimize": "speed", "memory_weight": 0.5}, "memory_weight", 0.5),
        ({"partitions": 4}, "active_microbatches", 6),
        ({"partitions": 4, "active_microbatches": 1}, "active_microbatches", 1),
        ({"partitions": 2}, "pipeline_parallel_degree", 2),
        ({"pipeline_parallel_degree": 2}, "partitions", 2),
        ({"partitions": 2, "pipeline_parallel_degree": 2}, "partitions", 2),
        ({"fp16_params": True}, "fp16", True),
        ({}, "placement", "DPT"),
        ({"placement_strategy": "spread"}, "placement", "TPD"),
        ({"placement_strategy": "PTD"}, "placement", "PTD"),
    ],
)
def test_a_key_follows_from_others_and_from_its_other_name(given: dict[str, Any], name: str, value: Any) -> None:
    assert getattr(Config.read(given), name) == value


NESTED: dict[str, Any] = {
    "smdistributed": {"modelparallel": {"enabled": True, "parameters": {"partitions": 2, "ddp": True}}},
    "mpi": {
        "enabled": True,
        "processes_per_host": 8,
        "custom_mpi_options": "--mca btl_vader_single_copy_mechanism none",
    },
}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"microbatch": 2}, "config: there is no key 'microbatch' here; did you mean 'microbatches'?"),
        ({"partition": 2}, "did you mean 'partitions'?"),
        ({"partitions": 2, "pipeline_parallel_degree": 4}, "partitions is 2 and pipeline_parallel_degree 4"),
        ({"fp16": False, "fp16_params": True}, "fp16_params is True and fp16 False"),
        ({"pipeline": "1f1b"}, "config.pipeline was given '1f1b': Input should be 'interleaved' or 'simple'"),
        ({"placement_strategy": "DDT"}, "config.placement_strategy was given 'DDT'"),
        ({"partitions": 0}, "config.pipeline_parallel_degree was given 0"),
        ({"partitions": "two"}, "config.pipeline_parallel_degree was given 'two'"),
        ({"memory_weight": 2}, "config.memory_weight was given 2"),
        ({"fp16": True, "bf16": True}, "fp16 and bf16 are both True"),
        ({"partitions": 2, "default_partition": 2}, "default_partition is 2"),
        ({"tensor_parallel_degree": 2}, "tensor_parallel_degree is 2 and ddp is False"),
        ({"sharded_data_parallel_degree": 2}, "sharded_data_parallel_degree is 2 and ddp is False"),
        ({"ddp": True, "sharded_data_parallel_degree": 2, "shard_optimizer_state": True}, "leave shard_optimizer"),
        ({"hybrid_shard_degree": 2}, "version 2; here it is sharded_data_parallel_degree"),
        (["partitions", 2], "it is a dict, the path of a JSON file, or None"),
        # In the vendor's nested form, with their place.
        ({"smdistributed": {"modelparallel": {"enabled": False}}}, "config.smdistributed.modelparallel.enabled is"),
        ({"smdistributed": {"dataparallel": {}}}, "config.smdistributed has 'dataparallel'; it must have"),
        (
            {"smdistributed": NESTED["smdistributed"], "partitions": 2},
            "has 'partitions' next to 'smdistributed'",
        ),
        ({"modelparallel": {"enabled": True, "parameters": 2}}, "config.modelparallel.parameters is 2; it is a dict"),
        ({"modelparallel": {"parameters": {"microbatch": 2}}}, "did you mean 'microbatches'?"),
    ],
)
def test_what_does_not_hold_is_told(given: Any, told: str) -> None:
    with pytest.raises(ArgumentError) as error:
        Config.read(given)
    assert told in str(error.value)


def test_a_file(tmp_path: Path) -> None:
    file = tmp_path / "smp.json"
    file.write_text(json.dumps({"partitions": 2, "sdp_reduce_bucket_size": 5e8}))
    assert Config.read(file) == Config.read(str(file)) == Config.read({"partitions": 2})
    file.write_text('{"partitions": 2, "microbatch": 4}')
    with pytest.raises(ArgumentError, match=r"smp\.json: config: there is no key 'microbatch'"):
        Config.read(file)
    file.write_text("[1]")
    with pytest.raises(ArgumentError, match=r"smp\.json: config is \[1\]; it is a dict"):
        Config.read(file)
    with pytest.raises(ArgumentError, match="there is no configuration"):
        Config.read(tmp_path / "other.json")


def test_the_launchers_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SM_HP_MP_PARAMETERS", '{"partitions": 2, "ddp": true}')
    assert Config.read() == Config.read({"partitions": 2, "ddp": True})
    monkeypatch.setenv("SMP_CONFIG", ' {"microbatches": 4}')
    assert Config.read() == Config.read({"microbatches": 4})
    (tmp_path / "smp.json").write_text('{"microbatches": 8}')
    monkeypatch.setenv("SMP_CONFIG", str(tmp_path / "smp.json"))
    assert Config.read().microbatches == 8
    assert Config.read({"microbatches": 2}).microbatches == 2  # an argument wins
    monkeypatch.setenv("SMP_CONFIG", '{"microbatches": 0}')
    with pytest.raises(ArgumentError, match="SMP_CONFIG: config.microbatches was given 0"):
        Config.read()
    monkeypatch.setenv("SMP_CONFIG", "{microbatches}")
    with pytest.raises(ArgumentError, match="SMP_CONFIG: line 1 column 2"):
        Config.read()


def test_the_vendors_nested_form(caplog: pytest.LogCaptureFixture) -> None:
    flat = Config.read({"partitions": 2, "ddp": True})
    assert not caplog.records
    assert Config.read(NESTED) == flat
    assert "mpi (processes are started by torchrun" in caplog.text
    assert Config.read(NESTED["smdistributed"]) == flat
    assert Config.read({"enabled": True, "parameters": {"partitions": 2, "ddp": True}}) == flat
    assert Config.read({"modelparallel": {"enabled": True}}) == Config.read()


def test_keys_without_effect_are_named_in_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    Config.read({"horovod": False, "contiguous": True, "deterministic_server": True, "mpi": {}, "microbatches": 2})
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    told = warnings[0].getMessage()
    assert all(key in told for key in ("horovod (`ddp`", "contiguous (it was for", "deterministic_server (", "mpi ("))
    assert "microbatches" not in told


def test_the_document_says_what_each_key_means() -> None:
    rows = []
    for name, field in Config.model_fields.items():
        why = [mark.why for mark in field.metadata if isinstance(mark, NoEffect)]
        rows.append([f"`{name}`", f"`{field.get_default()!r}`", f"no effect: {why[0]}" if why else field.description])
    assert table(ROOT / "docs" / "reference" / "smp.md", "key", "default", "meaning") == rows
