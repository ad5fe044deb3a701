"""Loops of training scripts that public reports are about: what each saw, step by step."""

import random
from collections.abc import Callable
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call, grad, vmap

from tests.foreign.script import Step, Training
from tests.foreign.structure_models import IGNORED, STEPS, summed


def step(job: Training, batch: Any) -> Step:
    """An ordinary step."""
    loss = job.loss_func(batch, job.model(*batch))
    loss.backward()
    job.optim.step()
    job.optim.zero_grad()
    return Step(loss.item())


def nothing(index: int) -> None:
    """Leave a step as it is."""


def loop(
    job: Training,
    before: Callable[[int], object] = nothing,
    between: Callable[[int], object] = nothing,
    after: Callable[[int], object] = nothing,
    every: int = 1,
) -> list[Step]:
    """Ordinary steps of `every` batches each, and what is done before, in and after them."""
    done = []
    for index, batch in enumerate(islice(job.batches(), STEPS)):
        before(index)
        loss = job.loss_func(batch, job.model(*batch))
        loss.backward()
        between(index)
        if index % every == every - 1:
            job.optim.step()
            job.optim.zero_grad()
        after(index)
        done.append(Step(loss.item()))
    return done


def generates(job: Training) -> list[Step]:
    """GRPO's: words are drawn, the best of them by the model itself, and what they are worth weighs their loss."""
    done = []
    for batch in islice(job.batches(), STEPS):
        words = batch[0]
        job.model.eval()
        with torch.no_grad():
            for _ in range(3):
                words = torch.cat([words, job.model(words).argmax(-1)[:, -1:]], 1)
        job.model.train()
        worth = (words % 3 - 1.0).mean(1)
        done.append(step(job, (words, worth)))
    return done


def sharpens(job: Training) -> list[Step]:
    """SAM by hand: up along the gradient, a second gradient there, and back."""
    done = []
    for batch in islice(job.batches(), STEPS):
        loss = job.loss_func(batch, job.model(*batch))
        loss.backward()
        grads = [p.grad for p in job.model.parameters() if p.grad is not None]
        norm = torch.stack([each.norm() for each in grads]).norm().item()
        moved = [(p, p.grad * (0.05 / norm)) for p in job.model.parameters() if p.grad is not None]
        with torch.no_grad():
            for parameter, by in moved:
                parameter.add_(by)
        job.optim.zero_grad()
        job.loss_func(batch, job.model(*batch)).backward()
        with torch.no_grad():
            for parameter, by in moved:
                parameter.sub_(by)
        job.optim.step()
        job.optim.zero_grad()
        done.append(Step(loss.item()))
    return done


def projects(job: Training) -> list[Step]:
    """PCGrad: gradients of two tasks, of each what does not go against the other."""
    done = []
    for batch in islice(job.batches(), STEPS):
        _, one, other = job.loss_func(batch, job.model(*batch))
        found = []
        for loss, again in ((one, True), (other, False)):
            job.optim.zero_grad()
            loss.backward(retain_graph=again)
            found.append([None if p.grad is None else p.grad.clone() for p in job.model.parameters()])
        first, second = (torch.cat([torch.zeros_like(p).flatten() if g is None else g.flatten()
                                    for p, g in zip(job.model.parameters(), grads, strict=True)])
                         for grads in found)  # fmt: skip
        dot = torch.dot(first, second).item()
        if dot < 0:
            first = first - second * (dot / second.square().sum().item())
        whole, place = first + second, 0
        for parameter in job.model.parameters():
            parameter.grad = whole[place : place + parameter.numel()].view_as(parameter).clone()
            place += parameter.numel()
        job.optim.step()
        job.optim.zero_grad()
        done.append(Step(one.item() + other.item()))
    return done


def normalizes_prototypes(job: Training) -> list[Step]:
    """SwAV's, which train only after a few steps."""

    def normalize(index: int) -> None:
        with torch.no_grad():
            job.model.head.weight.copy_(F.normalize(job.model.head.weight.data.clone(), dim=1))

    def freeze(index: int) -> None:
        for parameter in job.model.head.parameters() if index < 2 else ():
            parameter.grad = None

    return loop(job, before=normalize, between=freeze)


def per_sample(job: Training) -> list[Step]:
    """DP-SGD's: the gradient of each sample, clipped, without noise."""
    done = []
    for batch in islice(job.batches(), STEPS):
        parameters = {name: p.detach() for name, p in job.model.named_parameters()}

        def loss_of(values: Any, x: Tensor, label: Tensor) -> Tensor:
            return F.cross_entropy(functional_call(job.model, values, (x[None], label[None])), label[None])

        grads = vmap(grad(loss_of), in_dims=(None, 0, 0))(parameters, *batch)
        norms = torch.stack([each.flatten(1).norm(dim=1) for each in grads.values()]).norm(dim=0)
        factor = (0.5 / norms).clamp_max(1.0)
        for name, p in job.model.named_parameters():
            p.grad = (grads[name] * factor.view(-1, *[1] * (grads[name].dim() - 1))).mean(0)
        job.optim.step()
        job.optim.zero_grad()
        with torch.no_grad():
            done.append(Step(job.loss_func(batch, job.model(*batch)).item()))
    return done


def draws(job: Training) -> list[Step]:
    random.seed(5)
    return loop(job)


class ScheduleFree(torch.optim.Optimizer):
    """A mean of the weights is evaluated, others are trained; `train()` and `eval()` exchange them."""

    step_depends_on = "element"

    def __init__(self, params: Any, lr: float = 0.1, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0})
        self.is_training = True

    @torch.no_grad()
    def eval(self) -> None:
        if self.is_training:
            for group in self.param_groups:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], 1 - 1 / group["beta"])
            self.is_training = False

    @torch.no_grad()
    def train(self) -> None:
        if not self.is_training:
            for group in self.param_groups:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], 1 - group["beta"])
            self.is_training = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] += 1
            c = 1 / group["k"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                z = self.state[p].setdefault("z", p.detach().clone())
                p.lerp_(z, c).add_(p.grad, alpha=group["lr"] * (group["beta"] * (1 - c) - 1))
                z.sub_(p.grad, alpha=group["lr"])


def schedules_free(job: Training) -> list[Step]:
    done = []
    for batch in islice(job.batches(), STEPS):
        job.optim.train()
        done.append(step(job, batch))
        job.optim.eval()
        with torch.no_grad():
            done.append(Step(job.loss_func(batch, job.model(*batch)).item()))
    return done


def trains_few_layers(job: Training) -> list[Step]:
    """LISA: of the blocks another one trains every second step."""

    def choose(index: int) -> None:
        for place, block in enumerate(job.model.blocks):
            for parameter in block.parameters():
                parameter.requires_grad = place == index // 2 % 3

    return loop(job, before=choose)


def merges_adapters(job: Training) -> list[Step]:
    """ReLoRA: every second step adapters go into the weights, and start anew with their optimizer's states."""

    @torch.no_grad()
    def merge(index: int) -> None:
        for block in job.model.blocks if index % 2 else ():
            block.down.bias.add_(block.b.weight.mean(1))
            block.b.weight.zero_()
            for each in (block.a.weight, block.b.weight):
                if "momentum_buffer" in job.optim.state.get(each, {}):
                    job.optim.state[each]["momentum_buffer"].zero_()

    return loop(job, after=merge)


def follows(job: Training) -> list[Step]:
    """BYOL's teacher is a mean of the weights over steps."""

    @torch.no_grad()
    def follow(index: int) -> None:
        for mean, now in zip(job.model.teacher.parameters(), job.model.blocks.parameters(), strict=True):
            mean.lerp_(now.detach(), 0.1)

    return loop(job, after=follow)


def steps_in_backward(job: Training) -> list[Step]:
    """An optimizer a parameter, that steps as soon as its gradient is there."""
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in job.model.parameters()}

    def hook(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(hook)
    return loop(job, every=STEPS + 1)


def steps_in_hooks(job: Training) -> list[Step]:
    """Gradients that are clipped by their own norms and stepped on as they come, as LOMO does (arXiv 2306.09782)."""
    for parameter in job.model.parameters():

        def hook(gradient: Tensor, parameter: Tensor = parameter) -> None:
            parameter.data.add_(gradient / (gradient.norm() + 0.1), alpha=-0.05)

        parameter.register_hook(hook)
    return loop(job, after=lambda index: job.model.zero_grad(), every=STEPS + 1)


def clamps_in_hooks(job: Training) -> list[Step]:
    """Gradients clamped by hooks, added up over two passes."""
    for parameter in job.model.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    return loop(job, every=2)


def centralizes(job: Training) -> list[Step]:
    """Gradients less their means over all but the first dimension (arXiv 2004.01461)."""

    def centralize(index: int) -> None:
        for parameter in job.model.parameters():
            if parameter.grad is not None and parameter.grad.dim() > 1:
                parameter.grad.sub_(parameter.grad.mean(dim=1, keepdim=True))

    return loop(job, between=centralize)


def weighs_labels(job: Training) -> list[Step]:
    done = []
    for batch in islice(job.batches(), STEPS):
        loss = job.loss_func(batch, job.model(**batch))
        loss.backward()
        job.optim.step()
        job.optim.zero_grad()
        done.append(Step(loss.item(), weight=float((batch["labels"][:, 1:] != IGNORED).sum())))
    return done


def counts_items(job: Training) -> list[Step]:
    """transformers' way to accumulate: what all batches of a window have is counted before, over all processes."""
    done, batches = [], job.batches()
    for _ in range(STEPS):
        window = [next(batches) for _ in range(2)]
        mine = sum(len(each[1]) for each in window)
        items = summed(torch.tensor(float(mine)))
        total = 0.0
        for batch in window:
            loss = job.loss_func(batch, job.model(*batch, items))
            loss.backward()
            total += loss.item()
        job.optim.step()
        job.optim.zero_grad()
        done.append(Step(total))
    return done
