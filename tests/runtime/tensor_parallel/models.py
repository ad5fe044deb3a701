"""Small models of several families with random weights, batches of each, and training beside the same model whole."""

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests import language_models

VOCAB = 62
SIZES: Mapping[str, int] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}


def llama(heads: int = 4, kv_heads: int = 2) -> nn.Module:
    """Grouped keys and values, tied embeddings."""
    return language_models.llama(VOCAB, 8 * heads, heads=heads, kv_heads=kv_heads, tie_word_embeddings=True)


def gpt2(dropout: float = 0.0) -> nn.Module:
    """Fused queries, keys and values, in columns; untied heads of an odd vocabulary."""
    more = {"attn_pdrop": dropout, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "tie_word_embeddings": False}
    return language_models.gpt2(VOCAB + 1, **more)


def phi3() -> nn.Module:
    """Fused queries, keys and values of other sizes, read by numbers in the configuration."""
    return transformers.Phi3ForCausalLM(transformers.Phi3Config(**SIZES, num_key_value_heads=2, pad_token_id=0))


def qwen3() -> nn.Module:
    """Norms over each head, inside the split."""
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=8))


class Encoder(nn.Module):
    """torch's own encoder, whose attention hides its products."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.config = transformers.PretrainedConfig()

    def forward(self, pixel_values: Tensor) -> Any:
        x = pixel_values.flatten(2).transpose(1, 2).repeat(1, 1, 11)[..., :32]
        return transformers.utils.ModelOutput(logits=self.encoder(x))


bert = partial(language_models.bert, VOCAB)
"""Biases everywhere, a residual inside attention, a bias of the logits that two modules hold."""
t5 = partial(language_models.t5, VOCAB)
"""Tables of relative positions in first blocks that later ones are given, and attention across."""
vit = language_models.vit
"""No vocabulary."""
mixtral = partial(language_models.mixtral, VOCAB)
"""Experts in one parameter, with fused gates."""

FAMILIES: Mapping[str, Callable[[], nn.Module]] = {
    "llama": llama,
    "gpt2": gpt2,
    "bert": bert,
    "t5": t5,
    "vit": vit,
    "mixtral": mixtral,
    "phi3": phi3,
    "qwen3": qwen3,
    "encoder": Encoder,
}


def make(name: str, **settings: Any) -> nn.Module:
    """A model of the family, the same every time, with weights none of which is zero."""
    torch.manual_seed(3)
    family: Any = FAMILIES[name]
    model: nn.Module = family(**settings).train()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 0.15 if parameter.dim() > 1 else 0.3
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    model.config.use_cache = False
    return model


def batch(name: str, step: int = 0) -> dict[str, Tensor]:
    """The inputs of a step, the same on every rank."""
    generator = torch.Generator().manual_seed(100 + step)
    if name in ("vit", "encoder"):
        return {"pixel_values": torch.randn(3, 3, 8, 8, generator=generator)}
    tokens = torch.randint(0, VOCAB, (3, 7), generator=generator)
    return {"input_ids": tokens, "decoder_input_ids": tokens.flip(1)} if name == "t5" else {"input_ids": tokens}


def loss_of(output: Any) -> Tensor:
    """A loss that every logit enters with a weight of its own."""
    logits: Tensor = output.logits
    weights = torch.sin(torch.arange(logits.numel(), dtype=torch.float32)).view_as(logits)
    return (logits.float() * weights).mean() * 10


class Collectives(TorchDispatchMode):
    """Counts collectives by name. (CommDebugMode's own hooks break models that change results in place.)"""

    def __init__(self, namespaces: Collection[str] = ("c10d",)) -> None:
        super().__init__()
        self.namespaces, self.counts = namespaces, dict[str, int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in self.namespaces:
            self.counts[func._opname] = self.counts.get(func._opname, 0) + 1
        return func(*args, **(kwargs or {}))


def distance(got: Mapping[str, Tensor], expected: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> float:
    """‖Δp − Δp_ref‖ / ‖Δp_ref‖ over all parameters together."""
    assert got.keys() == expected.keys()
    error = torch.stack([(got[name] - expected[name]).double().norm() for name in got]).norm()
    return float(error / torch.stack([(expected[name] - before[name]).double().norm() for name in got]).norm())


def side_by_side(
    model: nn.Module,
    plain: nn.Module,
    loss_at: Callable[[nn.Module, int], Tensor],
    *,
    reduce: Callable[[nn.Module], None] = lambda model: None,
    state: Callable[[nn.Module], Mapping[str, Tensor]] = nn.Module.state_dict,
    steps: int = 2,
    lr: float = 0.02,
) -> dict[str, float]:
    """The distance of a split model's losses and updates from those of the same one whole.

    loss_at: (model, step) → loss; reduce: what data parallelism does to gradients; state: all of the split model's.
    """
    before = {name: value.clone() for name, value in plain.state_dict().items()}
    optims = [torch.optim.SGD(each.parameters(), lr=lr, momentum=0.9) for each in (model, plain)]
    errors = []
    for step in range(steps):
        losses = []
        for each, optim in zip((model, plain), optims, strict=True):
            loss = loss_at(each, step)
            loss.backward()
            if each is model:
                reduce(model)
            optim.step()
            optim.zero_grad()
            losses.append(loss.item())
        errors.append(abs(losses[0] - losses[1]) / abs(losses[1]))
    return {"loss": max(errors), "update": distance(state(model), plain.state_dict(), before)}
