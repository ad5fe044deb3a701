"""A sharded model's other methods mean what a plain one's mean: clearing gradients, freezing, generating."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from atorch.runtime.fsdp.groups import arrange, by_block, without_trainable
from atorch.runtime.fsdp.shard import shard
from tests.pool import Pool, on_ranks
from tests.runtime.sharing import VOCAB, make, param_groups, sgd, whole

CLEARINGS = ["model", "submodule", "zeros", "optimizer", "none by hand", "zeros by hand"]


def cleared_between(rank: int, size: int, keep: bool, clearing: str) -> tuple[float, int]:
    """The distance from plain gradients after stale ones were cleared between forward and backward, and how many."""
    model, plain = make("awkward"), make("awkward")
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("data",))
    shard(model, mesh, arrange(model, by_block(model)), reshard_after_forward=False if keep else None)
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(0, VOCAB, (2, 6), generator=generator)
    everyone = torch.cat(
        [torch.randint(0, VOCAB, (2, 6), generator=torch.Generator().manual_seed(r)) for r in range(size)]
    )
    for each, given in ((model, tokens), (plain, everyone)):
        optim = sgd(param_groups(each))
        each(given).square().mean().backward()
        loss = each(given).sin().mean()
        if clearing == "optimizer":
            optim.zero_grad()
        elif clearing == "submodule":
            for part in each.children():
                part.zero_grad()
            if isinstance(each.scale.grad, Tensor):
                each.scale.grad = None
        elif clearing == "none by hand":
            for parameter in each.parameters():
                parameter.grad = None
        elif clearing == "zeros by hand":
            for parameter in each.parameters():
                if parameter.grad is not None:
                    parameter.grad.zero_()
        else:
            each.zero_grad(set_to_none=clearing == "model")
        loss.backward()
    pairs = list(zip(model.parameters(), plain.parameters(), strict=True))
    assert [mine.grad is None for mine, _ in pairs] == [theirs.grad is None for _, theirs in pairs]
    errors = [(whole(m.grad) - t.grad).abs().max() for m, t in pairs if m.grad is not None and t.grad is not None]
    return float(torch.stack(errors).max()), len(errors)


def cleared_in_all_ways(rank: int, size: int) -> dict[str, tuple[float, int]]:
    found = {clearing: cleared_between(rank, size, True, clearing) for clearing in CLEARINGS}
    return {**found, "freed": cleared_between(rank, size, False, "model")}


@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_are_cleared_while_parameters_are_gathered(pool: Pool, ranks: int) -> None:
    for found in pool.run(cleared_in_all_ways, ranks=ranks):
        assert all(num > 10 and error <= 1e-6 for error, num in found.values()), found


@on_ranks()
def test_what_is_frozen_while_it_is_gathered_stays_frozen(rank: int, size: int) -> None:
    model = make("llama")
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("data",))
    shard(model, mesh, arrange(model, by_block(model)), reshard_after_forward=False)
    tokens = torch.randint(0, VOCAB, (2, 6))
    loss = model(tokens).sum()
    model.llama.model.layers[0].mlp.requires_grad_(False)
    loss.backward()
    model.zero_grad()
    model(tokens).sum().backward()
    frozen = [parameter for name, parameter in model.named_parameters() if "layers.0.mlp" in name]
    assert [parameter.grad for parameter in frozen] == [None] * 3


def lora(seed: int = 0) -> nn.Module:
    import peft

    torch.manual_seed(seed)
    tokens = {"vocab_size": VOCAB, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "max_position_embeddings": 32}
    config = transformers.LlamaConfig(**tokens, **sizes, num_attention_heads=2, num_key_value_heads=1)
    model = transformers.LlamaForCausalLM(config)
    settings = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    adapted: nn.Module = peft.get_peft_model(model, settings)
    return adapted


def generated(model: Any, rank: int) -> Tensor:
    prompt = torch.randint(2, VOCAB, (2, 3 + rank), generator=torch.Generator().manual_seed(rank))
    tokens: Tensor = model.generate(
        input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=3 + 4 * rank, do_sample=False
    )
    return tokens


def step(model: nn.Module, optim: torch.optim.Optimizer, ranks: list[int]) -> None:
    model.train()
    for rank in ranks:
        tokens = torch.randint(0, VOCAB, (2, 6), generator=torch.Generator().manual_seed(rank))
        logits = model(input_ids=tokens).logits
        (F.cross_entropy(logits.flatten(0, 1), tokens.flatten()) / len(ranks)).backward()
    optim.step()
    optim.zero_grad()


def adapted(rank: int, size: int, outmost: bool, keep: bool, first: bool) -> tuple[bool, bool, float]:
    """Whether tokens generated and logits in eval mode are plain training's, and the distance of the weights."""
    model, plain = lora(), lora()
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("data",))
    groups = without_trainable(by_block(model)) if outmost else by_block(model)
    shard(model, mesh, arrange(model, groups), reshard_after_forward=False if keep else None)
    same, close = [], []
    mine, theirs = (torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.5) for m in (model, plain))
    for number in range(3):
        if number or first:
            model.eval(), plain.eval()
            same.append(torch.equal(generated(model, rank), generated(plain, rank)))
            tokens = torch.arange(6).expand(2, 6)
            with torch.no_grad():
                close.append(
                    bool(torch.allclose(model(input_ids=tokens).logits, plain(input_ids=tokens).logits, atol=1e-5))
                )
        step(model, mine, [rank])
        step(plain, theirs, list(range(size)))
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    error = max(float((whole(a) - b.detach()).abs().max()) for a, b in pairs)
    return all(same) and len(same) >= 2, all(close), error


@pytest.mark.parametrize(
    ("outmost", "keep", "first"),
    [
        (False, True, True),
        (True, False, False),
        pytest.param(False, False, True, marks=pytest.mark.nightly),
        pytest.param(True, True, False, marks=pytest.mark.nightly),
    ],
)
def test_lora_generates_and_evaluates_between_steps(pool: Pool, outmost: bool, keep: bool, first: bool) -> None:
    for same, close, error in pool.run(adapted, outmost, keep, first):
        assert same
        assert close
        assert error <= 1e-5
