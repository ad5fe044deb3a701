"""What people do in their loops beside forward, backward and step: each a loop that sees a loss per step."""

import copy
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.foreign.script import Arguments, Samples, Training, drawn

STEPS, ROWS, BATCH, WIDTH, CLASSES = 6, 24, 8, 12, 3


class Block(nn.Module):
    """A residual block with a buffer that forward changes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Blocks, the last of which is used twice, between two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(5, WIDTH)
        self.blocks = nn.ModuleList([Block(WIDTH) for _ in range(3)])
        self.head = nn.Linear(WIDTH, CLASSES)

    def features(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.blocks[-1](x)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        return self.head(self.features(x))


@dataclass
class Output:
    """What `DataclassNet` returns."""

    logits: Tensor
    hidden: tuple[Tensor, ...]
    extra: dict[str, Any]


class DataclassNet(Net):
    """Its output is a dataclass."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        hidden = self.features(x)
        return Output(self.head(hidden), (hidden,), {"mean": hidden.mean(), "nothing": None})


def arguments(make: Callable[[], nn.Module] = Net, logits: Callable[[Any], Tensor] = lambda out: out) -> Arguments:
    """Of auto_accelerate."""
    torch.manual_seed(3)

    def sample(index: int) -> tuple[Tensor, Tensor]:
        return torch.randn(5, generator=drawn(index)), torch.tensor(index % CLASSES)

    return {
        "model": make(),
        "optim_func": torch.optim.SGD,  # which sees how large gradients are
        "optim_args": {"lr": 0.1, "momentum": 0.9},
        "dataset": Samples(ROWS, sample),
        "loss_func": lambda batch, output: F.cross_entropy(logits(output).float(), batch[1]),
        "model_input_format": "unpack_sequence",
        "dataloader_args": {"batch_size": BATCH},
    }


def step(job: Training, batch: Any) -> float:
    """A plain step."""
    loss = job.loss_func(batch, job.model(*batch))
    loss.backward()
    job.optim.step()
    job.optim.zero_grad()
    return loss.item()


def evaluated(model: nn.Module, job: Training) -> float:
    """The loss of the first two batches in eval mode."""
    model.eval()
    with torch.no_grad():
        losses = [job.loss_func(batch, model(*batch)).item() for batch in islice(job.batches(), 2)]
    model.train()
    return sum(losses) / 2


def evaluates(job: Training) -> list[float]:
    return [each for batch in islice(job.batches(), STEPS) for each in (step(job, batch), evaluated(job.model, job))]


def evaluates_first(job: Training) -> list[float]:
    return [evaluated(job.model, job)] + [step(job, batch) for batch in islice(job.batches(), STEPS)]


def evaluates_with_gradients(job: Training) -> list[float]:
    """A validation loss whose author forgot no_grad."""
    done = []
    for batch in islice(job.batches(), STEPS):
        done.append(step(job, batch))
        job.model.eval()
        done.append(job.loss_func(batch, job.model(*batch)).item())
        job.model.train()
    return done


def evaluates_in_inference_mode(job: Training) -> list[float]:
    done = []
    for batch in islice(job.batches(), STEPS):
        done.append(step(job, batch))
        with torch.inference_mode():
            done.append(job.loss_func(batch, job.model(*batch)).item())
    return done


def resumes_in_memory(job: Training) -> list[float]:
    """Back to a state that was kept, with the batches that followed it."""
    batches = list(islice(job.batches(), 4))
    done = [step(job, each) for each in batches[:2]]
    kept = copy.deepcopy(job.model.state_dict()), copy.deepcopy(job.optim.state_dict())
    done += [step(job, each) for each in batches[2:]]
    job.model.load_state_dict(kept[0])
    job.optim.load_state_dict(kept[1])
    again = [step(job, each) for each in batches[2:]]
    return done + again


def resumes_from_a_file(job: Training) -> list[float]:
    """The same with torch.save, each process its own."""
    batches = list(islice(job.batches(), 4))
    done = [step(job, each) for each in batches[:2]]
    file = io.BytesIO()
    torch.save({"model": job.model.state_dict(), "optim": job.optim.state_dict()}, file)
    done += [step(job, each) for each in batches[2:]]
    file.seek(0)
    kept = torch.load(file, weights_only=True)
    job.model.load_state_dict(kept["model"])
    job.optim.load_state_dict(kept["optim"])
    return done + [step(job, each) for each in batches[2:]]


def schedules(job: Training) -> list[float]:
    scheduler = torch.optim.lr_scheduler.OneCycleLR(job.optim, max_lr=0.2, total_steps=STEPS, cycle_momentum=False)
    done = []
    for batch in islice(job.batches(), STEPS):
        done.append(step(job, batch))
        scheduler.step()
    return done


def reduces_on_plateau(job: Training) -> list[float]:
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(job.optim, patience=0)
    done = []
    for index, batch in enumerate(islice(job.batches(), STEPS)):
        done.append(step(job, batch))
        scheduler.step(float(index))
    return done


def accumulates(job: Training) -> list[float]:
    done = []
    for index, batch in enumerate(islice(job.batches(), 2 * STEPS)):
        loss = job.loss_func(batch, job.model(*batch)) / 2
        loss.backward()
        if index % 2:
            job.optim.step()
            job.optim.zero_grad()
        done.append(loss.item())
    return done


def averages_its_weights(job: Training) -> list[float]:
    ema = copy.deepcopy(job.model)
    for parameter in ema.parameters():
        parameter.requires_grad_(False)
    done = []
    for batch in islice(job.batches(), STEPS):
        done.append(step(job, batch))
        with torch.no_grad():
            for mean, now in zip(ema.parameters(), job.model.parameters(), strict=True):
                mean.mul_(0.5).add_(now, alpha=0.5)
        done.append(evaluated(ema, job))
    return done


def averages_with_torch(job: Training) -> list[float]:
    ema = torch.optim.swa_utils.AveragedModel(job.model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    done = []
    for batch in islice(job.batches(), STEPS):
        done.append(step(job, batch))
        ema.update_parameters(job.model)
        done.append(evaluated(ema, job))
    return done


def averages_the_state(job: Training) -> list[float]:
    """As many scripts have it: a dict of means, put into the model for evaluation and taken out again."""
    means = {name: p.detach().clone() for name, p in job.model.named_parameters()}
    done = []
    for batch in islice(job.batches(), STEPS):
        done.append(step(job, batch))
        kept = {}
        for name, p in job.model.named_parameters():
            means[name] = 0.5 * means[name] + 0.5 * p.detach()
            kept[name] = p.data.clone()
            p.data.copy_(means[name])
        done.append(evaluated(job.model, job))
        for name, p in job.model.named_parameters():
            p.data.copy_(kept[name])
    return done


def hooks_modules(job: Training) -> list[float]:
    seen: list[float] = []
    modules = dict(job.model.named_modules())
    modules["blocks.1"].register_forward_hook(lambda module, args, output: seen.append(float(output.detach().mean())))
    modules["blocks.2"].register_forward_hook(lambda module, args, output: output * 1.5)
    modules["head"].register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))
    modules["blocks.0"].register_full_backward_hook(lambda module, gin, gout: (gin[0] * 0.5,))
    done = [step(job, batch) for batch in islice(job.batches(), STEPS)]
    on_every_process = len(seen) >= STEPS
    assert on_every_process
    return done


def hooks_gradients(job: Training) -> list[float]:
    for parameter in job.model.parameters():
        parameter.register_hook(lambda gradient: gradient * 0.5)
    done = []
    for batch in islice(job.batches(), STEPS):
        job.loss_func(batch, job.model(*batch)).backward()
        done.append(step(job, batch))
    return done


def calls_twice(job: Training) -> list[float]:
    """Two forward passes before one backward."""
    done = []
    for batch in islice(job.batches(), STEPS):
        noisy = (batch[0] * 0.9, batch[1])
        loss = job.loss_func(batch, job.model(*batch)) + job.loss_func(noisy, job.model(*noisy))
        loss.backward()
        job.optim.step()
        job.optim.zero_grad()
        done.append(loss.item())
    return done


def has_two_losses(job: Training) -> list[float]:
    done = []
    for batch in islice(job.batches(), STEPS):
        output = job.model(*batch)
        one, other = job.loss_func(batch, output), 0.1 * output.float().square().mean()
        one.backward(retain_graph=True)
        other.backward()
        job.optim.step()
        job.optim.zero_grad()
        done += [one.item(), other.item()]
    return done


def adds_two_losses(job: Training) -> list[float]:
    done = []
    for batch in islice(job.batches(), STEPS):
        output = job.model(*batch)
        loss = job.loss_func(batch, output) + 0.1 * output.float().square().mean()
        loss.backward()
        job.optim.step()
        job.optim.zero_grad()
        done.append(loss.item())
    return done


def leaves_out_backward(job: Training) -> list[float]:
    """A batch whose loss is not wanted: forward without backward."""
    done = []
    for index, batch in enumerate(islice(job.batches(), 2 * STEPS)):
        loss = job.loss_func(batch, job.model(*batch))
        done.append(loss.item())
        if index % 3 == 1:
            continue
        loss.backward()
        job.optim.step()
        job.optim.zero_grad()
    return done


def clips_by_torch(job: Training) -> list[float]:
    done = []
    for batch in islice(job.batches(), STEPS):
        loss = job.loss_func(batch, job.model(*batch))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(job.model.parameters(), 0.1)
        job.optim.step()
        job.optim.zero_grad()
        done.append(loss.item())
    return done


def clips_values(job: Training) -> list[float]:
    done = []
    for batch in islice(job.batches(), STEPS):
        loss = job.loss_func(batch, job.model(*batch))
        loss.backward()
        torch.nn.utils.clip_grad_value_(job.model.parameters(), 1e-2)
        job.optim.step()
        job.optim.zero_grad(set_to_none=False)
        done.append(loss.item())
    return done


def clamps_weights(job: Training) -> list[float]:
    done = []
    for batch in islice(job.batches(), STEPS):
        done.append(step(job, batch))
        with torch.no_grad():
            for parameter in job.model.parameters():
                parameter.clamp_(-0.2, 0.2)
        for parameter in job.model.parameters():
            parameter.data.mul_(0.99)
    return done


def wants_gradients_of_inputs(job: Training) -> list[float]:
    """An adversarial step on the inputs, then one on the weights."""
    done = []
    for batch in islice(job.batches(), STEPS):
        rows = batch[0].clone().requires_grad_(True)
        job.loss_func(batch, job.model(rows, batch[1])).backward()
        assert rows.grad is not None
        job.optim.zero_grad()
        done.append(step(job, (rows.detach() + 0.01 * rows.grad.sign(), batch[1])))
    return done


def freezes_later(job: Training) -> list[float]:
    done = []
    for index, batch in enumerate(islice(job.batches(), STEPS)):
        if index == 2:
            for name, parameter in job.model.named_parameters():
                if name.startswith("embed"):
                    parameter.requires_grad_(False)
        done.append(step(job, batch))
    return done


def skips_a_block(job: Training) -> list[float]:
    """Parameters that a pass does not use, on no process: their gradient is none."""
    job.model.blocks[0].forward = lambda x: x
    return [step(job, batch) for batch in islice(job.batches(), STEPS)]


def steps_without_gradients_left(job: Training) -> list[float]:
    """zero_grad before forward, and of the model."""
    done = []
    for batch in islice(job.batches(), STEPS):
        job.model.zero_grad()
        loss = job.loss_func(batch, job.model(*batch))
        loss.backward()
        job.optim.step()
        done.append(loss.item())
    return done


HABITS: Mapping[str, Callable[[Training], list[float]]] = {
    each.__name__: each
    for each in (
        evaluates, evaluates_first, evaluates_with_gradients, evaluates_in_inference_mode, resumes_in_memory,
        resumes_from_a_file, schedules, reduces_on_plateau, accumulates, averages_its_weights, averages_with_torch,
        averages_the_state, hooks_modules, hooks_gradients, calls_twice, has_two_losses, adds_two_losses,
        leaves_out_backward, clips_by_torch, clips_values, clamps_weights, wants_gradients_of_inputs, freezes_later,
        skips_a_block, steps_without_gradients_left,
    )
}  # fmt: skip


def _frozen() -> nn.Module:
    net = Net()
    for parameter in net.blocks[0].parameters():
        parameter.requires_grad_(False)
    net.embed.bias.requires_grad_(False)
    return net


def _hooked() -> nn.Module:
    net = Net()
    net.blocks[1].register_forward_hook(_half_again)
    net.head.weight.register_hook(_halved)
    net.blocks[0].register_forward_pre_hook(_doubled, with_kwargs=True)
    return net


def _half_again(module: nn.Module, args: Sequence[Any], output: Tensor) -> Tensor:
    return output * 1.5


def _halved(gradient: Tensor) -> Tensor:
    return gradient * 0.5


def _doubled(module: nn.Module, args: Any, kwargs: Any) -> Any:
    return (args[0] * 2,), kwargs


class DictNet(Net):
    """Its output is a dict."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        return {"logits": self.head(self.features(x)), "parts": [x, None, "text"]}


MODELS: Mapping[str, Callable[[], Arguments]] = {
    "frozen": lambda: arguments(_frozen),
    "hooked": lambda: arguments(_hooked),
    "dict": lambda: arguments(DictNet, lambda out: out["logits"]),
    "dataclass": lambda: arguments(DataclassNet, lambda out: out.logits),
}
