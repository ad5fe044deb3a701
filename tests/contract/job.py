"""The job every method is held to: a small Llama with tied embeddings, trained for real on every rank's own data.

Parity is measured on the *update* of the parameters, all together, with SGD, against plain single-process PyTorch on
the same global batches: ‖Δp − Δp_ref‖ / ‖Δp_ref‖.
"""

from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from atorch import auto_accelerate
from atorch.distributed.collectives import gather_objects
from atorch.runtime.tensor_parallel import whole_state
from tests.auto.training import steps
from tests.language_models import llama

STEPS = 3
BATCH = 8
SEQ = 16
VOCAB = 64


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Fixed random token sequences, all different."""

    def __init__(self, num: int = STEPS * BATCH) -> None:
        generator = torch.Generator().manual_seed(7)
        self.tokens = torch.randint(0, VOCAB, (num, SEQ), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def make_model(attention: str = "eager") -> nn.Module:
    """A Llama with grouped keys and values and tied embeddings; the same weights every time."""
    torch.manual_seed(3)
    return llama(VOCAB, max_position_embeddings=SEQ, tie_word_embeddings=True, attn_implementation=attention)


def loss_func(batch: Any, output: Any) -> torch.Tensor:
    """The model's own loss, taken from its logits so that the batch is really used."""
    logits = output["logits"][:, :-1].float()
    return nn.functional.cross_entropy(logits.reshape(-1, VOCAB), batch["labels"][:, 1:].reshape(-1))


def arguments(**more: Any) -> dict[str, Any]:
    """The keyword arguments of auto_accelerate for this job."""
    return {
        "optim_func": torch.optim.SGD,
        "optim_args": {"lr": 0.1},
        "dataset": Tokens(),
        "loss_func": loss_func,
        "model_input_format": "unpack_dict",
        "dataloader_args": {"batch_size": BATCH},
        **more,
    }


def snapshot(model: nn.Module) -> dict[str, torch.Tensor]:
    """All parameters by name in fp32, tied ones once, whatever they are split or sharded over."""
    state = whole_state(model)
    return {name: state[name].detach().float().cpu().clone() for name, _ in model.named_parameters()}


def reference() -> tuple[dict[str, torch.Tensor], list[float]]:
    """The updates and losses of plain single-process training on the global batches."""
    model = make_model()
    before = snapshot(model)
    batches = ({"input_ids": tokens, "labels": tokens} for tokens in Tokens().tokens.split(BATCH))
    losses, _ = steps(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_func, batches)
    return updates(before, snapshot(model)), losses


def updates(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What training changed."""
    return {name: after[name] - before[name] for name in before}


def distance(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """‖got − expected‖ / ‖expected‖ over all parameters together."""
    assert got.keys() == expected.keys(), sorted(got.keys() ^ expected.keys())
    difference = torch.stack([(got[name] - expected[name]).norm() for name in expected]).norm()
    return float(difference / torch.stack([value.norm() for value in expected.values()]).norm())


def first_names(model: nn.Module) -> dict[str, str]:
    """For every name of a parameter the first that it has."""
    seen: dict[int, str] = {}
    return {name: seen.setdefault(id(each), name) for name, each in model.named_parameters(remove_duplicate=False)}


def train(load_strategy: Any, attention: str = "eager", **more: Any) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The updates and losses of the documented loop under a strategy."""
    model = make_model(attention)
    before, names = snapshot(model), first_names(model)
    status, result, _ = auto_accelerate(model, load_strategy=load_strategy, **arguments(**more))
    device = next(result.model.parameters()).device
    batches = (result.prepare_input(batch, device) for batch in result.dataloader)
    losses, _ = steps(result.model, result.optim, result.loss_func, batches)
    after = {names[name]: value for name, value in snapshot(result.model).items()}
    return updates({name: before[name] for name in after}, after), losses


def deviation(
    rank: int, size: int, load_strategy: Any, attention: str = "eager", verify: bool = True
) -> tuple[float, float]:
    """How far a strategy's updates, and its losses averaged over ranks, are from the plain ones."""
    got, losses = train(load_strategy, attention, verify=verify)
    expected, expected_losses = reference()
    mean = torch.tensor(losses)
    torch.distributed.all_reduce(mean)
    loss_error = (mean / size - torch.tensor(expected_losses)).abs().max()
    held = {name for names in gather_objects(list(got)) for name in names}  # a stage of a pipeline has its own
    assert held == expected.keys(), sorted(held ^ expected.keys())
    return distance(got, {name: expected[name] for name in got}), float(loss_error)
