"""Models that are hard to share out, through the front door: frozen parameters, groups with own rates, LoRA."""

from typing import Any

import peft
import torch
from torch import nn
from torch.nn import functional as F

from tests.auto.training import accelerate
from tests.contract.job import distance, updates
from tests.runtime.sharing import BATCH, SEQ, STEPS, VOCAB, make, param_groups, sgd, whole

MAX_NORM = 0.5


TOKENS = torch.randint(0, VOCAB, (STEPS * BATCH, SEQ), generator=torch.Generator().manual_seed(2))


def loss_func(tokens: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].reshape(-1, VOCAB).float(), tokens[:, 1:].reshape(-1))


def make_model(name: str, seed: int = 0) -> nn.Module:
    """A model of tests.runtime.sharing, or one of them under LoRA."""
    if name != "lora":
        return make(name, seed)
    torch.manual_seed(seed)
    config = peft.LoraConfig(target_modules=["q_proj", "down_proj"], r=2, lora_alpha=4, init_lora_weights=False)
    return peft.get_peft_model(make("llama", seed), config)


def accelerated(strategy: Any, name: str, seed: int = 0, **more: Any) -> Any:
    """The result of auto_accelerate on one of the models."""
    more = {"optim_func": sgd, "optim_args": None, "optim_param_func": param_groups, **more}
    return accelerate(make_model(name, seed), strategy, list(TOKENS), loss_func, BATCH, **more)


def deviation(rank: int, size: int, strategy: Any, name: str, clip: bool = False) -> float:
    """‖Δp − Δp_ref‖ / ‖Δp_ref‖ of the documented loop, and of its norms where it clips."""
    result = accelerated(strategy, name)
    plain = make_model(name)
    before = {key: value.clone() for key, value in plain.state_dict().items()}
    optim = sgd(param_groups(plain))
    for step, batch in enumerate(result.dataloader):
        loss = result.loss_func(batch, result.model(batch))
        if result.args["use_optim_backward"]:
            result.optim.backward(loss)
        else:
            loss.backward()
        tokens = TOKENS[step * BATCH : (step + 1) * BATCH]
        loss_func(tokens, plain(tokens)).backward()
        if clip:
            norm = result.model.clip_grad_norm_(MAX_NORM)
            expected = nn.utils.clip_grad_norm_(plain.parameters(), MAX_NORM)
            assert abs(float(norm) / float(expected) - 1) < 1e-4, (norm, expected)
        for each in (result.optim, optim):
            each.step()
            each.zero_grad()
    got = {key: whole(value) for key, value in result.model.state_dict().items()}
    return distance(updates(before, got), updates(before, plain.state_dict()))
