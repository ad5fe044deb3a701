"""User code on a sharded model's parameters: it means the same, or is told of which it cannot be."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from atorch.errors import ArgumentError
from atorch.runtime.fsdp.groups import FsdpUnit, arrange, by_block, without_trainable
from atorch.runtime.fsdp.shard import shard
from tests.auto.training import run_each
from tests.pool import Pool, on_ranks
from tests.runtime.sharing import VOCAB, make, param_groups, sgd, whole

WIDTH = 4


class Model(nn.Module):
    """A recurrent layer, and a head that `take_road` may give something of it."""

    def __init__(self, take_road: Callable[[nn.LSTM], Callable[[Tensor], Tensor]] | None = None) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, WIDTH)
        self.road = None if take_road is None else take_road(self.rnn)

    def forward(self, x: Tensor, hidden: Any = None) -> Tensor:
        y, _ = self.rnn(x, hidden)
        y = self.head(y)
        return y if self.road is None else y + self.road(y)


def by_closure(rnn: nn.LSTM) -> Callable[[Tensor], Tensor]:
    weight = rnn.weight_hh_l0
    return lambda y: F.linear(y, weight[:WIDTH])


def by_default(rnn: nn.LSTM) -> Callable[[Tensor], Tensor]:
    def road(y: Tensor, weight: Tensor = rnn.bias_hh_l0) -> Tensor:
        return y * weight[:WIDTH]

    return road


def by_partial(rnn: nn.LSTM) -> Callable[[Tensor], Tensor]:
    return partial(F.linear, weight=rnn.weight_ih_l0)


def by_module(rnn: nn.LSTM) -> Callable[[Tensor], Tensor]:
    return lambda y: F.linear(y, rnn.weight_hh_l0[:WIDTH])


REFUSED = [
    (by_closure, "rnn.weight_hh_l0 is sharded, and something computes with the tensor that it was before"),
    (by_default, "rnn.bias_hh_l0 is sharded, and something computes with the tensor that it was before"),
    (by_partial, "rnn.weight_ih_l0 is sharded, and something computes with the tensor that it was before"),
    (by_module, r"rnn.weight_hh_l0 is sharded where it is read.*atorch_ignored_cls=\('rnn.weight_hh_l0',\)"),
]


def sharded(size: int, road: Any = None) -> Model:
    model = Model(road)
    shard(model, init_device_mesh("cpu", (size,)), [FsdpUnit((model.rnn,)), FsdpUnit((model.head,))])
    return model


@on_ranks()
def test_a_parameter_that_cannot_be_read_is_named(rank: int, size: int) -> None:
    for road, message in REFUSED:
        model = sharded(size, road)
        with pytest.raises(ArgumentError, match=message):
            model(torch.ones(2, 3, WIDTH))


@on_ranks()
def test_hidden_states_are_made_of_a_parameter_and_what_waits_for_backward_stays_gathered(rank: int, size: int) -> None:
    torch.manual_seed(0)
    model = sharded(size)
    torch.manual_seed(0)
    plain, x = Model(), torch.ones(2, 3, WIDTH)

    def ways(model: Model) -> list[Tensor]:
        first = next(model.parameters())
        return [first.new_zeros(1, 2, WIDTH), first.data.new_zeros(1, 2, WIDTH), first.detach().new_ones(1, 2, WIDTH)]

    pairs = [
        (model(x, (mine, mine)), plain(x, (theirs, theirs)))
        for mine, theirs in zip(ways(model), ways(plain), strict=True)
    ]
    assert max(float((mine - theirs).abs().max()) for mine, theirs in pairs) < 1e-6
    results = []
    for keeps in (True, False):
        torch.manual_seed(0)
        model = Model(by_module)
        if keeps:
            groups = [FsdpUnit((model.rnn,)), FsdpUnit((model.head,))]
            shard(model, init_device_mesh("cpu", (size,)), groups, reshard_after_forward=False)
        for _ in range(2):
            loss = model(torch.ones(2, 3, WIDTH)).square().sum()
            with torch.no_grad():
                model(torch.ones(1, 3, WIDTH))
            loss.backward()
        gradient = model.rnn.weight_hh_l0.grad
        results.append(gradient.full_tensor() if keeps else gradient)
    assert float((results[0] - results[1]).abs().max()) < 1e-6


@on_ranks()
def test_data_of_a_sharded_parameter_is_written_and_not_assigned(rank: int, size: int) -> None:
    model = sharded(size)
    kept = model.head.weight.data
    model.head.weight.data = kept * 0.5
    with pytest.raises(ArgumentError, match=r"head.weight.data was assigned.*copy_"):
        model(torch.ones(2, 3, WIDTH))
    with pytest.raises(ArgumentError, match=r"head.weight.data was assigned"):
        model.state_dict()
    model.head.weight.data = kept
    model.head.weight.data.mul_(0.5)
    model(torch.ones(2, 3, WIDTH))


@on_ranks()
def test_values_of_one_call_are_refused_and_torch_nn_init_writes_the_shards(rank: int, size: int) -> None:
    model, x = sharded(size), torch.ones(2, 3, WIDTH)
    nn.init.constant_(model.head.bias, 0.25)
    nn.init.zeros_(model.head.weight)
    assert torch.equal(model.to("cpu").float()(x), torch.full_like(x, 0.25))
    with pytest.raises(ArgumentError, match=r"is sharded in torch.float32 on cpu, and was to be torch.float64"):
        model.double()
    with pytest.raises(ArgumentError, match=r"head.bias is sharded, and a call has another tensor in its place"):
        torch.func.functional_call(model, {"head.bias": torch.zeros(WIDTH)}, (x,))
    assert torch.equal(model(x), torch.full_like(x, 0.25))
    model.head = nn.Linear(WIDTH, WIDTH)
    with pytest.raises(ArgumentError, match=r"head.weight is of a module that the model was given after"):
        model(x)


def by_parts(model: Any, optim: torch.optim.Optimizer) -> None:
    for part in model.children():
        part.zero_grad()
    if isinstance(model.scale.grad, Tensor):
        model.scale.grad = None


def zeros_by_hand(model: nn.Module, optim: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()


CLEARINGS: Mapping[str, Callable[[Any, torch.optim.Optimizer], None]] = {
    "the model": lambda model, optim: model.zero_grad(),
    "its parts": by_parts,
    "to zeros": lambda model, optim: model.zero_grad(set_to_none=False),
    "the optimizer": lambda model, optim: optim.zero_grad(),
    "by hand": lambda model, optim: [setattr(each, "grad", None) for each in model.parameters()],
    "zeros by hand": zeros_by_hand,
}


def cleared_between(rank: int, size: int, keep: bool, way: str) -> None:
    """Stale gradients are cleared between forward and backward, which gives plain ones."""
    model, plain = make("awkward"), make("awkward")
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("data",))
    shard(model, mesh, arrange(model, by_block(model)), reshard_after_forward=False if keep else None)
    tokens = [torch.randint(0, VOCAB, (2, 6), generator=torch.Generator().manual_seed(r)) for r in range(size)]
    for each, given in ((model, tokens[rank]), (plain, torch.cat(tokens))):
        optim = sgd(param_groups(each))
        each(given).square().mean().backward()
        loss = each(given).sin().mean()
        CLEARINGS[way](each, optim)
        loss.backward()
    pairs = list(zip(model.parameters(), plain.parameters(), strict=True))
    assert [mine.grad is None for mine, _ in pairs] == [theirs.grad is None for _, theirs in pairs]
    errors = [(whole(m.grad) - t.grad).abs().max() for m, t in pairs if m.grad is not None and t.grad is not None]
    assert len(errors) > 10
    assert max(errors) <= 1e-6


@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_are_cleared_while_parameters_are_gathered(pool: Pool, ranks: int) -> None:
    run_each(pool, cleared_between, [*((True, way) for way in CLEARINGS), (False, "the model")], ranks=ranks)


def lora(seed: int = 0) -> nn.Module:
    import peft

    torch.manual_seed(seed)
    tokens = {"vocab_size": VOCAB, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "max_position_embeddings": 32}
    config = transformers.LlamaConfig(**tokens, **sizes, num_attention_heads=2, num_key_value_heads=1)
    model = transformers.LlamaForCausalLM(config)
    settings = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    return peft.get_peft_model(model, settings)


def generated(model: Any, rank: int) -> Tensor:
    prompt = torch.randint(2, VOCAB, (2, 3 + rank), generator=torch.Generator().manual_seed(rank))
    return model.generate(
        input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=3 + 4 * rank, do_sample=False
    )


def step(model: nn.Module, optim: torch.optim.Optimizer, ranks: list[int]) -> None:
    model.train()
    for rank in ranks:
        tokens = torch.randint(0, VOCAB, (2, 6), generator=torch.Generator().manual_seed(rank))
        logits = model(input_ids=tokens).logits
        (F.cross_entropy(logits.flatten(0, 1), tokens.flatten()) / len(ranks)).backward()
    optim.step()
    optim.zero_grad()


@pytest.mark.parametrize(
    ("outmost", "keep", "first"),
    [
        (False, True, True),
        (True, False, False),
        pytest.param(False, False, True, marks=pytest.mark.nightly),
        pytest.param(True, True, False, marks=pytest.mark.nightly),
    ],
)
@on_ranks()
def test_lora_generates_and_evaluates_between_steps(
    rank: int, size: int, outmost: bool, keep: bool, first: bool
) -> None:
    """Tokens generated and logits in eval mode are those of the plain model, and weights are plain training's."""
    model, plain = lora(), lora()
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("data",))
    groups = without_trainable(by_block(model)) if outmost else by_block(model)
    shard(model, mesh, arrange(model, groups), reshard_after_forward=False if keep else None)
    mine, theirs = (torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.5) for m in (model, plain))
    for number in range(3):
        if number or first:
            model.eval(), plain.eval()
            assert torch.equal(generated(model, rank), generated(plain, rank))
            tokens = torch.arange(6).expand(2, 6)
            with torch.no_grad():
                logits = [each(input_ids=tokens).logits for each in (model, plain)]
            torch.testing.assert_close(*logits, atol=1e-5, rtol=1e-5)
        step(model, mine, [rank])
        step(plain, theirs, list(range(size)))
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    assert max(float((whole(a) - b.detach()).abs().max()) for a, b in pairs) <= 1e-5
