"""Plans written for torchtitan, Megatron-LM and AutoModel: keys that the trainer knows, and the same strategy again."""

import itertools
import re

import pytest

from atorch.auto.strategy import Strategy
from atorch.errors import ArgumentError, AtorchError
from atorch.trainer_configs import Source, TrainingSetup, recognised, target
from atorch.trainer_configs.keys import Keys
from atorch.trainer_configs.shell import is_known, read_script

WORLD, BATCH = 16, 64
HALF = ["half", {"dtype": "bf16"}]
MODES = {"none": [], "full": ["checkpoint"], "selective": [["checkpoint", {"selective": True}]]}
SCHEDULES = [{}, {"schedule": "gpipe"}, {"schedule": "interleaved"}]


def compositions(tool):
    """Strategies of 16 processes: every combination of mesh, data parallelism, recomputation and compilation."""
    sizes = itertools.product((1, 2, 4), (1, 2), (1, 2))
    kinds = itertools.product(("ddp", "zero1", "zero2", "fsdp", "hsdp"), MODES, (False, True), (False, True))
    for (tensor, context, stages), (data, mode, compiled, cut) in itertools.product(list(sizes), list(kinds)):
        shares = WORLD // (tensor * context * stages)
        if data == "hsdp" and shares < 4:
            continue
        axes = {"tensor": tensor, "context": context, "data": shares, "pipeline": stages}
        if data == "hsdp":
            axes = {"tensor": tensor, "context": context, "zero": shares // 2, "data": 2, "pipeline": stages}
        methods = [HALF, *MODES[mode], *(["compile"] if compiled else [])]
        methods += ["tensor_parallel", ["sequence_parallel", {"mode": "megatron"}]] if tensor > 1 else []
        methods += ["context_parallel"] if context > 1 else []
        methods += [["pipeline_parallel", SCHEDULES[len(mode) % 3]]] if stages > 1 else []
        methods += ["fsdp" if data == "hsdp" else data] if shares * context > 1 else []
        by_each = data in ("zero2", "fsdp", "hsdp") and stages == 1 and (tool != "automodel" or compiled)
        methods += [["micro_batch", {"size": 2, **({"reduce": "each"} if by_each else {})}]] if cut else []
        mesh = ["parallel_mode", {"slices": [[name, size] for name, size in axes.items() if size > 1]}]
        strategy = Strategy.of([mesh, *methods])
        if not target(tool).lacks(strategy):
            yield strategy


def exported(tool, strategy, folder, **more):
    given = {"model": "meta-llama/Llama-3.1-8B", "seq": 2048, **more}
    setup = TrainingSetup.of_strategy(strategy, tool, 2, WORLD // 2, BATCH, **given)
    ((name, text),) = target(tool).write(setup).items()
    (folder / name).write_text(text)
    return setup, Source.of(str(folder / name))


@pytest.mark.parametrize(("tool", "least"), [("torchtitan", 150), ("megatron", 60), ("automodel", 150)])
def test_every_composition_is_explained_to_the_same_strategy(tool, least, tmp_path):
    count = 0
    for strategy in compositions(tool):
        setup, source = exported(tool, strategy, tmp_path)
        assert recognised(source).name == tool
        again = target(tool).read(source)
        assert again.strategy(WORLD) == strategy
        assert again.batches(WORLD) == setup.batches(WORLD), strategy
        assert again.seq == 2048
        assert again.model == setup.model or again.shape["layers"] == 32
        assert [entry.key for entry in again.entries if entry.kind == "unknown"] == []
        count += 1
    assert count >= least


def words_of(folder, name):
    words = read_script((folder / name).read_text()).main_command.words
    start = next(index for index, word in enumerate(words) if word in ("pretrain_gpt.py", "torchtitan.train"))
    return list(words[start + 1 :])


def misfit(facts, key, value):
    """The reason why the newest version would not take a flag's value, or None."""
    if key in facts["choices"]:
        return None if value in facts["choices"][key] else f"{key} is one of {', '.join(facts['choices'][key])}"
    kind = next((kind for kind, keys in facts["types"].items() if key in keys), None)
    form = {"int": r"-?\d+", "float": r"-?[\d.]+(e-?\d+)?", "flag": "", "bool": "true|false|True|False|"}
    if kind is not None and re.fullmatch(form.get(kind.rstrip("*"), ".+"), value):
        return None
    return f"{key} takes {kind}, not {value!r}" if kind is not None else f"there is no {key}"


@pytest.mark.parametrize("tool", ["torchtitan", "megatron"])
def test_flags_and_values_are_those_of_the_trainers_source(tool, tmp_path):
    facts = Keys.of(tool).facts
    for strategy in compositions(tool):
        exported(tool, strategy, tmp_path, knobs={"optimizer": "adamw_bf16"})
        words = words_of(tmp_path, f"{tool}.sh")
        for index, word in enumerate(words):
            if not word.startswith("--") or word in ("--module", "--config"):
                continue
            value = words[index + 1] if index + 1 < len(words) and not words[index + 1].startswith("--") else ""
            value = "" if ":" in value else value
            key = word if tool == "megatron" else word.removeprefix("--").replace(".no-", ".").replace("-", "_")
            assert misfit(facts, key, value) is None, (strategy, word, value)


def test_keys_of_a_recipe_are_those_of_automodels_source(tmp_path):
    known = Keys.of("automodel").facts["sections"]
    for strategy in compositions("automodel"):
        for knobs in ({}, {"lora": "16:q,v"}, {"qlora": True, "optimizer": "adamw8bit"}):
            _, source = exported("automodel", strategy, tmp_path, knobs=knobs)
            assert set(source.data) <= set(known["$"])
            for section, values in source.data.items():
                if "*" not in known.get(section, "*"):
                    assert set(values) <= set(known[section]), section
            inner = source.data["distributed"].get("pipeline", {})
            assert set(inner) <= set(known["distributed.pipeline"])


MORE = {
    "torchtitan": [
        [HALF, "fsdp", ["offload", {"parameters": 1.0}]],
        [HALF, "fsdp", "cross_entropy"],
        [HALF, "fsdp", ["cross_entropy", {"chunk_tokens": 1024}]],
        ["fsdp"],
    ],
    "megatron": [
        [["half", {"dtype": "fp16"}], "zero1", ["offload", {"optimizer": 0.5}]],
        [HALF, ["fp8", {"exclude": ["head"]}], "zero1"],
        ["zero1", "checkpoint"],
    ],
    "automodel": [
        [HALF, "fsdp", ["offload", {"parameters": 1.0}]],
        [HALF, "fsdp", "cross_entropy", ["fp8", {"exclude": ["head"]}]],
        [["amp_native", {"dtype": "bf16"}], "ddp", "checkpoint"],
        ["fsdp"],
    ],
}


@pytest.mark.parametrize(("tool", "methods"), [(tool, methods) for tool, lists in MORE.items() for methods in lists])
def test_other_methods_are_explained_to_the_same_strategy(tool, methods, tmp_path):
    strategy = Strategy.of([["parallel_mode", {"slices": [["data", WORLD]]}], *methods])
    assert target(tool).lacks(strategy) == ()
    assert target(tool).read(exported(tool, strategy, tmp_path)[1]).strategy(WORLD) == strategy


@pytest.mark.parametrize(
    ("tool", "knobs"),
    [
        ("torchtitan", {"optimizer": "adamw_bf16"}),
        ("torchtitan", {"dtype": "bf16"}),
        ("megatron", {"optimizer": "muon"}),
        ("megatron", {"optimizer": "adamw8bit"}),
        ("megatron", {"attention": "eager"}),
        ("automodel", {"lora": "16"}),
        ("automodel", {"lora": "8:k,q,v", "qlora": True}),
        ("automodel", {"dtype": "bf16", "optimizer": "adamw8bit"}),
    ],
)
def test_knobs_are_explained_to_the_same(tool, knobs, tmp_path):
    strategy = Strategy.of(
        [["parallel_mode", {"slices": [["data", WORLD]]}], "zero1" if tool == "megatron" else "fsdp"]
    )
    again = target(tool).read(exported(tool, strategy, tmp_path, knobs=knobs)[1])
    assert {**again.knobs, "lora": str(again.knobs.get("lora")).replace("_proj", "")} == {
        **knobs,
        "lora": str(knobs.get("lora")),
    }


def test_optimizers_and_adapters_that_a_trainer_lacks_are_refused(tmp_path):
    strategy = Strategy.of([["parallel_mode", {"slices": [["data", WORLD]]}], HALF, "fsdp"])
    for tool, knobs in (
        ("torchtitan", {"lora": "8"}),
        ("megatron", {"qlora": True}),
        ("automodel", {"optimizer": "x"}),
    ):
        with pytest.raises(AtorchError):
            exported(tool, strategy, tmp_path, knobs=knobs)
    with pytest.raises(ArgumentError, match="--seq"):
        exported("torchtitan", strategy, tmp_path, seq=None)


def test_a_model_that_is_not_in_the_catalogue_is_left_to_the_user(tmp_path):
    strategy = Strategy.of([["parallel_mode", {"slices": [["data", WORLD]]}], HALF, "fsdp"])
    for tool, variable in (("torchtitan", "CONFIG:?"), ("megatron", "MODEL_ARGS:?")):
        exported(tool, strategy, tmp_path, model="some/model")
        assert variable in (tmp_path / f"{tool}.sh").read_text()
        assert not all(map(is_known, read_script((tmp_path / f"{tool}.sh").read_text()).main_command.words))
