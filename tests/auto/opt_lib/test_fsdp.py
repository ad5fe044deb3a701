"""fsdp through the front door: its knobs, every argument of FSDP1, hybrid sharding, LoRA."""

import functools
import json
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.fsdp import wrap
from torch.distributed.tensor import DTensor

from atorch.auto import auto_accelerate
from atorch.auto.opt_lib.fsdp import Fsdp
from atorch.auto.strategy import Strategy
from atorch.errors import StrategyError
from atorch.model.structure import find_modules
from tests.auto.opt_lib.sharing_job import accelerated, deviation
from tests.auto.training import assert_trains_like_plain, run_each
from tests.pool import Pool
from tests.runtime.sharing import Block, make

RECOMMENDED = {
    "forward_prefetch": True,
    "limit_all_gathers": True,
    "sync_module_states": True,
    "use_orig_params": True,
    "atorch_wrap_cls": (Block,),
}


def large(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    """A policy as people write them for FSDP1."""
    return recurse or nonwrapped_numel > 100


CONFIGS: list[tuple[str, Any]] = [
    ("awkward", RECOMMENDED),
    ("llama", {"cpu_offload": True}),
    ("lora", None),
    ("lora", {"fsdp_wrap_params_outmost": True}),
    ("awkward", {"sharding_strategy": "NO_SHARD"}),
]
HYBRID = ("parallel_mode", ([("zero", 2), ("data", 2)], None))


def test_trains_and_clips_as_one_process_does(pool: Pool) -> None:
    assert_trains_like_plain(pool, deviation, [([("fsdp", config)], name, True) for name, config in CONFIGS])


@pytest.mark.slow
def test_four_processes_share_out_both_ways(pool: Pool) -> None:
    cases: list[Any] = [([HYBRID, "fsdp"], "awkward", True)]
    cases.append(([HYBRID, ("fsdp", {"sharding_strategy": "HYBRID_SHARD"})], "awkward", True))
    cases.append(([("fsdp", {"reshard_after_forward": 2})], "llama"))
    assert_trains_like_plain(pool, deviation, cases, ranks=4)
    ((found, *_),) = run_each(pool, sharded, [("llama", None, [HYBRID])], ranks=4)
    assert found["placements"] == "(Replicate(), Shard(dim=0))"


def sharded(rank: int, size: int, name: str, config: Any, strategy: list[Any]) -> dict[str, Any]:
    model = accelerated([*strategy, ("fsdp", config)], name).model
    return {
        "gathered": [path for path, module in model.named_modules() if isinstance(module, fsdp.FSDPModule)],
        "whole": [path for path, p in model.named_parameters() if not isinstance(p, DTensor)],
        "placements": str(next(p for p in model.parameters() if isinstance(p, DTensor)).placements),
        "bytes": sum(p.to_local().nbytes for p in model.parameters() if isinstance(p, DTensor)),
        "all_bytes": sum(p.nbytes for p in model.parameters()),
    }


def test_what_is_gathered_and_what_stays_whole(pool: Pool) -> None:
    ignored = {"ignored_modules": ["mixer"], "ignored_states": "blocks.1.down.bias"}
    cases = [
        ("llama", None, []),
        ("llama", {"atorch_wrap_cls": ("LlamaMLP",)}, []),
        ("awkward", ignored, []),
        ("llama", {"sharding_strategy": "NO_SHARD"}, []),
    ]
    (first, second), (named, _), (partly, _), unsharded = run_each(pool, sharded, cases)
    layers = ["llama.model.layers.0", "llama.model.layers.1"]
    assert first["gathered"] == ["", "llama.model.embed_tokens", *layers, "llama.lm_head"]
    assert first["bytes"] + second["bytes"] == first["all_bytes"]
    assert named["gathered"] == ["", "llama.model.layers.0.mlp", "llama.model.layers.1.mlp"]
    assert sorted(partly["whole"]) == ["blocks.1.down.bias", "mixer.bias", "mixer.weight", "scale"]
    assert all(each["bytes"] == each["all_bytes"] for each in unsharded)

    assert pool.run(buffers)[0] == BF16

    assert run_each(pool, seeded_apart, [(None,), ({"sync_module_states": True},)]) == [[0.0, 0.0]] * 2


def dtypes(rank: int, size: int, config: Any, strategy: list[Any]) -> tuple[str, str, str]:
    result = accelerated([*strategy, ("fsdp", config)], "llama")
    seen: list[str] = []
    block = result.model.llama.model.layers[0]
    block.mlp.register_forward_hook(lambda module, args, output: seen.append(str(module.up_proj.weight.dtype)))
    batch = next(iter(result.dataloader))
    result.loss_func(batch, result.model(batch)).backward()
    weight = block.mlp.up_proj.weight
    return seen[0], str(weight.dtype), str(weight.grad.dtype)


FP32, BF16 = "torch.float32", "torch.bfloat16"


def test_precision_is_the_users_else_the_precision_methods(pool: Pool) -> None:
    expected: list[tuple[Any, list[Any], tuple[str, str, str]]] = [
        (None, [], (FP32, FP32, FP32)),
        ({"mixed_precision": {"param_dtype": torch.bfloat16}}, [], (BF16, FP32, FP32)),
        (None, [("amp_native", "bf16")], (BF16, FP32, FP32)),
        ({"mixed_precision": {}}, [("amp_native", "bf16")], (FP32, FP32, FP32)),
        (None, [("half", "bf16")], (BF16, BF16, BF16)),
    ]
    found = run_each(pool, dtypes, [(config, strategy) for config, strategy, _ in expected])
    assert [first for first, _ in found] == [dtypes for *_, dtypes in expected]


def buffers(rank: int, size: int) -> str:
    return str(accelerated([("fsdp", {"mixed_precision": {"buffer_dtype": "bf16"}})], "awkward").model.shift.dtype)


def seeded_apart(rank: int, size: int, config: Any) -> float:
    model = accelerated([("fsdp", config)], "awkward", seed=rank).model
    return float((model.mixer.weight.full_tensor() - make("awkward").mixer.weight).abs().max())


POLICIES: list[tuple[Any, set[Any]]] = [
    (functools.partial(wrap.size_based_auto_wrap_policy, min_num_params=100, force_leaf_modules={Block}), set()),
    (large, set()),
    (lambda module, recurse, nonwrapped_numel: True, set()),
    (functools.partial(wrap.lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, nn.Linear)), set()),
    (wrap.CustomPolicy(lambda module: isinstance(module, Block)), set()),
    (
        functools.partial(
            wrap._or_policy,
            policies=[
                functools.partial(
                    wrap.lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, nn.Embedding)
                ),
                functools.partial(wrap.transformer_auto_wrap_policy, transformer_layer_cls={Block}),
            ],
        ),
        set(),
    ),
    (large, {"mixer"}),
]


@pytest.mark.parametrize(("policy", "ignored"), POLICIES)
def test_a_policy_wraps_what_fsdp1_wraps(policy: Any, ignored: set[str]) -> None:
    model = make("awkward")
    left_out = [model.get_submodule(name) for name in ignored]
    method = Fsdp.of({"auto_wrap_policy": policy, "ignored_modules": left_out}).settled(model)
    again = Fsdp.of(json.loads(json.dumps(method.model_dump(mode="json", exclude_unset=True))))
    assert again == method  # a file holds it
    got = [f"{name}." for name in find_modules(model, again.atorch_wrap_cls, "test")]

    class Marked(nn.Module):
        """In place of FSDP1, which would need a process group."""

        def __init__(self, module: nn.Module, **_: Any) -> None:
            super().__init__()
            self.module = module

    if isinstance(policy, wrap.CustomPolicy):
        expected = [f"{name}." for name, module in model.named_modules() if isinstance(module, Block)]
    else:
        apart = {parameter for module in left_out for parameter in module.parameters()}
        wrapped, _ = wrap._recursive_wrap(model, policy, Marked, set(left_out), apart)
        names = [name for name, module in wrapped.named_modules() if name and isinstance(module, Marked)]
        expected = [f"{name}." if name else "" for name in names]
        expected = [each.replace("module.", "") for each in expected]
        lists = {f"{name}." for name, module in make("awkward").named_modules() if isinstance(module, nn.ModuleList)}
        expected = [each for each in expected if each not in lists]
    assert got == expected
    assert got


def test_objects_of_the_model_become_names() -> None:
    model = make("awkward")
    config = {
        "ignored_modules": {model.mixer},
        "ignored_states": [model.blocks[1].down.bias],
        "atorch_ignored_cls": "Norm",
    }
    with pytest.raises(StrategyError, match="no file can hold"):
        Strategy.of([("fsdp", config)]).to_json()
    settled = Strategy.of([("fsdp", config)]).settled(model)
    assert settled[0].atorch_ignored_cls == ("Norm", ".mixer", "blocks.1.down.bias")
    assert Strategy.of(settled.to_json()) == settled
    assert settled.settled(model) is settled
    for each in (nn.Linear(1, 1), nn.Parameter(torch.ones(1))):
        with pytest.raises(StrategyError, match="not inside of"):
            Fsdp.of({"ignored_modules": [each]}).settled(model)
    for policy in (lambda module: True, lambda module, recurse, unwrapped_params: True):
        with pytest.raises(StrategyError, match=r"takes \(module.*\), and is asked as policy\(module=…, recurse=…"):
            Fsdp.of({"auto_wrap_policy": policy}).settled(model)
    with pytest.raises(StrategyError, match="wraps no module of"):
        Fsdp.of({"auto_wrap_policy": lambda **_: False}).settled(model)
    with pytest.raises(StrategyError, match="arguments of its own"):
        Fsdp.of(
            {"auto_wrap_policy": wrap.CustomPolicy(lambda m: {"cpu_offload": True} if m is model.mixer else False)}
        ).settled(model)


def objects_of_a_model(rank: int, size: int, folder: str) -> tuple[list[str], str]:
    model = make("awkward")
    config = {"auto_wrap_policy": large, "ignored_modules": [model.mixer]}
    path = f"{folder}/strategy.json"
    status, result, best = auto_accelerate(
        model, torch.optim.SGD, load_strategy=[("fsdp", config)], save_strategy_to_file=path, optim_args={"lr": 0.1}
    )
    again = make("awkward")
    auto_accelerate(again, torch.optim.SGD, load_strategy=path, optim_args={"lr": 0.1})
    for one in (result.model, again):
        assert not isinstance(one.mixer.weight, DTensor)
    found = [[n for n, m in each.named_modules() if isinstance(m, fsdp.FSDPModule)] for each in (result.model, again)]
    assert found[0] == found[1]
    return found[0], str(best)


def test_the_front_door_asks_saves_and_fills_what_is_on_the_meta_device(pool: Pool, tmp_path: Path) -> None:
    (gathered, said), (others, also) = pool.run(objects_of_a_model, str(tmp_path))
    assert gathered == others
    assert said == also
    assert len(gathered) > 1

    assert pool.run(filled, str(tmp_path)) == [16.0, 16.0]


def ones(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        nn.init.ones_(parameter)


def filled(rank: int, size: int, folder: str) -> float:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    config = {"param_init_fn": ones}
    with pytest.raises(StrategyError, match="param_init_fn"):
        auto_accelerate(
            model, torch.optim.SGD, load_strategy=[("fsdp", config)], save_strategy_to_file=f"{folder}/s.json"
        )
    auto_accelerate(model, torch.optim.SGD, load_strategy=[("fsdp", config)], optim_args={"lr": 0.1})
    return float(model[0].weight.full_tensor().sum())


class Recurrent(nn.Module):
    """Makes its first hidden state from a parameter, as PyTorch's word_language_model does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.rnn, self.head = nn.Embedding(20, 16), nn.LSTM(16, 16, 2), nn.Linear(16, 20)

    def init_hidden(self, batch: int) -> tuple[torch.Tensor, ...]:
        weight = next(self.parameters())
        return weight.new_zeros(2, batch, 16), weight.new_full((2, batch, 16), 0.5, requires_grad=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        output, _ = self.rnn(self.embed(tokens.t()), self.init_hidden(len(tokens)))
        bias = self.head.weight.new_tensor([0.5]) + self.embed.weight.new_ones(1).to(self.embed.weight.device)
        bias = bias + torch.ones_like(self.head.weight)[0] + self.head.bias.data.new_full((16,), 0.25)
        bias = bias + torch.zeros_like(self.head.bias, dtype=torch.float64)[:16].float()
        bias = bias + self.head.bias.data.new(16).zero_() + self.head.bias.detach().new_ones(16)
        return self.head((output + bias).flatten(0, 1))  # type: ignore[no-any-return]


def recurrent_losses(rank: int, size: int, strategy: Any) -> list[float]:
    """The losses of a few steps on the same batch; the hidden state is made in a loop, too."""
    model, tokens = Recurrent(), torch.arange(40).reshape(8, 5) % 20
    job = {"optim_func": torch.optim.SGD, "optim_args": {"lr": 0.5}, "load_strategy": strategy}
    _, result, _ = auto_accelerate(model, **job)
    losses = []
    for _ in range(4):
        assert type(result.model.init_hidden(3)[0]) is torch.Tensor
        loss = nn.functional.cross_entropy(result.model(tokens), tokens.t().flatten())
        loss.backward()
        result.optim.step()
        result.optim.zero_grad()
        losses.append(loss.item())
        assert not strategy or type(torch.zeros_like(result.model.head.weight)) is DTensor  # as an optimizer means it
    return losses


def test_what_a_forward_makes_from_a_parameter_is_a_plain_tensor(pool: Pool) -> None:
    plain, methods = recurrent_losses(0, 1, []), ("fsdp", "zero2")
    for losses in chain(*run_each(pool, recurrent_losses, [([method],) for method in methods])):
        assert losses == pytest.approx(plain, rel=1e-5)
    for method in methods:
        assert recurrent_losses(0, 1, [method]) == pytest.approx(plain, rel=1e-6)


@pytest.mark.parametrize("name", ["fsdp", "zero2", "chunk"])
def test_quantized_weights_are_named(name: str) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = nn.Sequential(nn.Linear(32, 32).requires_grad_(False), nn.Linear(32, 32))
    quantize_(model[0], Int8WeightOnlyConfig())
    with pytest.raises(
        StrategyError, match=rf"{name} cannot take 0.weight apart, .*Int8Tensor.*quantize after training"
    ):
        auto_accelerate(model, torch.optim.SGD, [torch.ones(32)] * 4, lambda b, o: o.sum(), load_strategy=[name])


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("name", ["fsdp", "zero2", "chunk"])
def test_scripted_modules_are_named(name: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 4)))
    with pytest.raises(StrategyError, match=rf"{name} cannot put parameters of its own into 1, a ScriptModule"):
        auto_accelerate(model, torch.optim.SGD, [torch.ones(4)] * 4, lambda b, o: o.sum(), load_strategy=[name])
