"""Training scripts of structures that public reports are about, each a model and a loop: what a loop saw, step by step.

Losses of two processes, each weighted, are plain training's on one process: what a model or a loss looks at beyond its
own samples it gathers over processes, as the originals do.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap

from tests.foreign.script import Arguments, Samples, Step, Training, drawn

STEPS, ROWS, BATCH, WIDTH, TOKENS, WORDS = 5, 40, 8, 12, 6, 17
IGNORED = -100


class Structure(NamedTuple):
    """What makes the arguments of auto_accelerate, and the loop."""

    make: Callable[[], Arguments]
    loop: Callable[[Training], list[Step]]


class Block(nn.Module):
    """A residual block of two layers."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Net(nn.Module):
    """Blocks between two layers."""

    block: type[nn.Module] = Block

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(5, WIDTH), nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList(self.block() for _ in range(3))

    def features(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        return self.head(self.features(x))


class Language(nn.Module):
    """Blocks between a table of words and a layer."""

    block: type[nn.Module] = Block

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(self.block() for _ in range(3))

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _row(index: int) -> tuple[Tensor, Tensor]:
    return torch.randn(5, generator=drawn(index)), torch.tensor(index % 3)


def _text(index: int) -> tuple[Tensor, Tensor]:
    words = torch.randint(0, WORDS, (2, TOKENS), generator=drawn(index))
    return words[0], words[1]


def _classes(batch: Any, output: Any) -> Tensor:
    return F.cross_entropy(output, batch[1])


def _of(
    model: Callable[[], nn.Module], loss: Callable[[Any, Any], Any] = _classes, **more: Any
) -> Callable[[], Arguments]:
    def make() -> Arguments:
        torch.manual_seed(3)
        return {
            "model": model(),
            "optim_func": torch.optim.SGD,
            "optim_args": {"lr": 0.1, "momentum": 0.9},
            "dataset": Samples(ROWS, _row),
            "loss_func": loss,
            "model_input_format": "unpack_sequence",
            "dataloader_args": {"batch_size": BATCH},
            **more,
        }

    return make


def _step(job: Training, batch: Any) -> Step:
    loss = job.loss_func(batch, job.model(*batch))
    loss.backward()
    job.optim.step()
    job.optim.zero_grad()
    return Step(loss.item())


def _plain_loop(job: Training) -> list[Step]:
    return [_step(job, batch) for batch in islice(job.batches(), STEPS)]


def _several() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1


def _summed(value: Tensor) -> Tensor:
    if _several():
        dist.all_reduce(value)
    return value


def _gathered(value: Tensor) -> Tensor:
    return torch.cat(differentiable.all_gather(value)) if _several() else value


# Preference optimization with adapters: the reference is the model without them.


class Adapted(Block):
    """A frozen block with an adapter that can be turned off, as peft's."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.adapter, self.is_on = nn.Linear(WIDTH, WIDTH, bias=False), True

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (self.adapter(x) if self.is_on else 0)

    def turn(self, on: bool) -> None:
        self.is_on = on
        for parameter in self.adapter.parameters():
            parameter.requires_grad = on


class Preferring(Language):
    """Log-ratios to itself without adapters."""

    block = Adapted

    def __init__(self) -> None:
        super().__init__()
        self.embed.requires_grad_(False)
        self.head.requires_grad_(False)

    def _likelihood(self, words: Tensor) -> Tensor:
        found = super().forward(words[:, :-1]).log_softmax(-1)
        return found.gather(2, words[:, 1:, None])[..., 0].sum(1)

    def _margin(self, chosen: Tensor, refused: Tensor) -> Tensor:
        return self._likelihood(chosen) - self._likelihood(refused)

    def forward(self, chosen: Tensor, refused: Tensor) -> Tensor:
        for block in self.blocks:
            block.turn(False)
        with torch.no_grad():
            reference = self._margin(chosen, refused)
        for block in self.blocks:
            block.turn(True)
        return self._margin(chosen, refused) - reference


def _preference(batch: Any, output: Tensor) -> Tensor:
    return -F.logsigmoid(output).mean()


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [each for each in model.parameters() if each.requires_grad]


# Policy gradients of what the model generated itself.


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
        done.append(_step(job, (words, worth)))
    return done


def _policy(batch: Any, output: Tensor) -> Tensor:
    words, worth = batch
    if not worth.is_floating_point():  # of the loader: tried before there is a worth
        worth = worth.float().mean(1)
    likelihood = -F.cross_entropy(output[:, :-1].transpose(1, 2), words[:, 1:], reduction="none")
    return -(likelihood.mean(1) * worth).mean()


# Two gradients a step.


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


class TwoHeads(Net):
    """Two tasks on one trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        found = self.features(x)
        return self.head(found), self.other(found)


def _both(batch: Any, output: Any) -> Any:
    one, other = F.cross_entropy(output[0], batch[1]), output[1].square().mean()
    return one + other, one, other


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


# What looks at samples of all processes.


class TwoTowers(nn.Module):
    """CLIP's: features of either side, of length one."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = (nn.Sequential(nn.Linear(5, WIDTH), Block(), Block()) for _ in range(2))

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        return F.normalize(self.one(x), dim=-1), F.normalize(self.other(x.flip(1)), dim=-1)


def _contrast(batch: Any, output: Any) -> Tensor:
    logits = 5 * _gathered(output[0]) @ _gathered(output[1]).T
    return F.cross_entropy(logits, torch.arange(len(logits)))


class Quantizing(nn.Module):
    """A codebook whose codes move to the mean of what they stand for, over all processes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("codes", torch.randn(6, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        z = self.inner(x)
        nearest = torch.cdist(z, self.codes).argmin(-1)
        found = self.codes[nearest]
        if self.training:
            with torch.no_grad():
                hot = F.one_hot(nearest, 6).float()
                sums, counts = _summed(hot.T @ z), _summed(hot.sum(0))
                self.codes.lerp_(torch.where(counts[:, None] > 0, sums / counts.clamp_min(1)[:, None], self.codes), 0.3)
        return x + z + (found - z).detach()


class Codebook(Net):
    block = Quantizing


class Prototypes(Net):
    """SwAV's: assignments to prototypes, balanced over all processes without gradient."""

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        return self.head(F.normalize(self.features(x), dim=-1)), self.head(F.normalize(self.features(x * 0.9), dim=-1))


def _swapped(batch: Any, output: Any) -> Tensor:
    def assigned(scores: Tensor) -> Tensor:
        with torch.no_grad():
            q = (scores / 0.3).exp().T
            q = q / _summed(q.sum())
            for _ in range(3):
                q = q / _summed(q.sum(1, keepdim=True)) / len(q)
                q = q / q.sum(0, keepdim=True)
        return q.T

    one, other = output
    losses = [-(assigned(a) * F.log_softmax(b / 0.3, -1)).sum(1).mean() for a, b in ((one, other), (other, one))]
    return (losses[0] + losses[1]) / 2


def normalizes_prototypes(job: Training) -> list[Step]:
    done = []
    for index, batch in enumerate(islice(job.batches(), STEPS)):
        with torch.no_grad():
            weight = F.normalize(job.model.head.weight.data.clone(), dim=1)
            job.model.head.weight.copy_(weight)
        loss = job.loss_func(batch, job.model(*batch))
        loss.backward()
        if index < 2:
            for name, parameter in job.model.named_parameters():
                if name.startswith("head"):
                    parameter.grad = None
        job.optim.step()
        job.optim.zero_grad()
        done.append(Step(loss.item()))
    return done


# Derivatives within forward.


class Flow(Net):
    """MeanFlow's: a directional derivative of the network by its input."""

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        found, change = jvp(lambda rows: self.head(self.features(rows)), (x,), (torch.ones_like(x),))
        return found - 0.1 * change.detach()


class Forces(Net):
    """The gradient of an energy by the positions, through which training goes back once more."""

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        x = x.detach().requires_grad_(True)
        with torch.enable_grad():
            energy = self.head(torch.tanh(self.features(x))).sum()
            return torch.autograd.grad(energy, x, create_graph=True)[0][:, :3]


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


# What runs depends on the data.


class Pondering(Net):
    """ACT's: a block runs until every sample has halted."""

    def __init__(self) -> None:
        super().__init__()
        self.halt = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        x = self.embed(x)
        left = torch.ones(len(x), 1)
        for index in range(4):
            x = x + left * (self.blocks[index % 3](x) - x)
            left = left * (1 - torch.sigmoid(self.halt(x)))
            left = left * (left >= 0.3)
            if not bool(left.any()):
                break
        return self.head(x)


class Experts(nn.Module):
    """Experts as modules, of which those run that some sample is sent to."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for index in chosen.unique().tolist():
            (rows,) = torch.where(chosen == index)
            out = out.index_add(0, rows, torch.tanh(self.experts[index](x[rows])) * weights[rows, None])
        return x + out


class Mixture(Net):
    block = Experts


class Chance(Block):
    """A block that is scaled by a number that Python draws."""

    def forward(self, x: Tensor) -> Tensor:
        factor = random.random() if self.training else 0.5
        return x + factor * self.down(F.gelu(self.up(x)))


class Chances(Net):
    block = Chance


class CountedLayers(Net):
    """Every other block is left out, by a count of passes."""

    count = 0

    def features(self, x: Tensor) -> Tensor:
        self.count += self.training
        x = self.embed(x)
        for number, block in enumerate(self.blocks):
            if (self.count + number) % 2:
                x = block(x)
        return x


def draws(job: Training) -> list[Step]:
    random.seed(5)
    return _plain_loop(job)


# Optimizers and what is done to them.


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
        done.append(_step(job, batch))
        job.optim.eval()
        with torch.no_grad():
            done.append(Step(job.loss_func(batch, job.model(*batch)).item()))
    return done


def trains_few_layers(job: Training) -> list[Step]:
    """LISA: of the blocks another one trains every second step."""
    done = []
    for index, batch in enumerate(islice(job.batches(), STEPS)):
        for place, block in enumerate(job.model.blocks):
            for parameter in block.parameters():
                parameter.requires_grad = place == index // 2 % 3
        done.append(_step(job, batch))
    return done


class LowRank(Block):
    """A frozen block with an adapter of low rank."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.a, self.b = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.b(self.a(x))


class Adapters(Net):
    block = LowRank


def merges_adapters(job: Training) -> list[Step]:
    """ReLoRA: every second step adapters go into the weights, and start anew with their optimizer's states."""
    done = []
    for index, batch in enumerate(islice(job.batches(), STEPS)):
        done.append(_step(job, batch))
        if index % 2:
            with torch.no_grad():
                for block in job.model.blocks:
                    block.down.bias.add_(block.b.weight.mean(1))
                    block.b.weight.zero_()
                    for each in (block.a.weight, block.b.weight):
                        if "momentum_buffer" in job.optim.state.get(each, {}):
                            job.optim.state[each]["momentum_buffer"].zero_()
    return done


class Observing(Block):
    """Weights rounded by a range that is observed: its buffers get their size in the first pass."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("low", torch.tensor([]))
        self.register_buffer("high", torch.tensor([]))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            low, high = self.up.weight.amin(1), self.up.weight.amax(1)
            if self.low.numel() == 0:
                self.low.resize_(low.shape).copy_(low)
                self.high.resize_(high.shape).copy_(high)
            self.low.copy_(torch.minimum(self.low, low))
            self.high.copy_(torch.maximum(self.high, high))
            scale = ((self.high - self.low) / 15).clamp_min(1e-6)[:, None]
            rounded = (self.up.weight / scale).round() * scale
        weight = self.up.weight + (rounded - self.up.weight).detach()
        return x + self.down(F.gelu(F.linear(x, weight, self.up.bias)))


class Quantized(Net):
    block = Observing


class Teaching(Net):
    """BYOL's: a copy that follows, without gradient, and is predicted."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.ModuleList(self.block() for _ in range(3)).requires_grad_(False)
        self.teacher.load_state_dict(self.blocks.state_dict())

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        with torch.no_grad():
            target = self.embed(x * 0.9)
            for block in self.teacher:
                target = block(target)
        found = self.features(x)
        return self.head(found), found, target


def _follows(batch: Any, output: Any) -> Tensor:
    return F.cross_entropy(output[0], batch[1]) + F.mse_loss(output[1], output[2])


def follows(job: Training) -> list[Step]:
    done = []
    for batch in islice(job.batches(), STEPS):
        done.append(_step(job, batch))
        with torch.no_grad():
            for mean, now in zip(job.model.teacher.parameters(), job.model.blocks.parameters(), strict=True):
                mean.lerp_(now.detach(), 0.1)
    return done


def steps_in_backward(job: Training) -> list[Step]:
    """An optimizer a parameter, that steps as soon as its gradient is there."""
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in job.model.parameters()}

    def hook(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(hook)
    done = []
    for batch in islice(job.batches(), STEPS):
        loss = job.loss_func(batch, job.model(*batch))
        loss.backward()
        done.append(Step(loss.item()))
    return done


def steps_in_hooks(job: Training) -> list[Step]:
    """Gradients that are clipped by their own norms and stepped on as they come, as LOMO does (arXiv 2306.09782)."""
    for parameter in job.model.parameters():

        def hook(gradient: Tensor, parameter: Tensor = parameter) -> None:
            parameter.data.add_(gradient / (gradient.norm() + 0.1), alpha=-0.05)

        parameter.register_hook(hook)
    done = []
    for batch in islice(job.batches(), STEPS):
        loss = job.loss_func(batch, job.model(*batch))
        loss.backward()
        job.model.zero_grad()
        done.append(Step(loss.item()))
    return done


def clamps_in_hooks(job: Training) -> list[Step]:
    """Gradients clamped by hooks, added up over two passes."""
    for parameter in job.model.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    done = []
    for number, batch in enumerate(islice(job.batches(), STEPS)):
        loss = job.loss_func(batch, job.model(*batch))
        loss.backward()
        if number % 2:
            job.optim.step()
            job.optim.zero_grad()
        done.append(Step(loss.item()))
    return done


def centralizes(job: Training) -> list[Step]:
    """Gradients less their means over all but the first dimension (arXiv 2004.01461)."""
    done = []
    for batch in islice(job.batches(), STEPS):
        loss = job.loss_func(batch, job.model(*batch))
        loss.backward()
        for parameter in job.model.parameters():
            if parameter.grad is not None and parameter.grad.dim() > 1:
                parameter.grad.sub_(parameter.grad.mean(dim=1, keepdim=True))
        job.optim.step()
        job.optim.zero_grad()
        done.append(Step(loss.item()))
    return done


# What a loss is a mean over.


class Documents(Language):
    """Documents one after another in one row."""

    def forward(self, input_ids: Tensor, labels: Tensor, position_ids: Tensor) -> Tensor:
        hidden = self.embed(input_ids) + 0.1 * torch.cos(position_ids[..., None] * torch.arange(1, WIDTH + 1))
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def _document(index: int) -> Tensor:
    return torch.randint(0, WORDS, (3 + index % 5,), generator=drawn(index))


def _packed(documents: Sequence[Tensor]) -> dict[str, Tensor]:
    labels = [torch.cat([torch.tensor([IGNORED]), each[1:]]) for each in documents]
    positions = [torch.arange(len(each)) for each in documents]
    rows = {"input_ids": list(documents), "labels": labels, "position_ids": positions}
    return {name: torch.cat(parts)[None] for name, parts in rows.items()}


def _of_labels(batch: Any, output: Tensor) -> Tensor:
    return F.cross_entropy(output[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=IGNORED)


def weighs_labels(job: Training) -> list[Step]:
    done = []
    for batch in islice(job.batches(), STEPS):
        loss = job.loss_func(batch, job.model(**batch))
        loss.backward()
        job.optim.step()
        job.optim.zero_grad()
        done.append(Step(loss.item(), weight=float((batch["labels"][:, 1:] != IGNORED).sum())))
    return done


class Counting(nn.Module):
    """A model that computes its loss, a mean over labels, or a sum over what the loop counted."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: Tensor, labels: Tensor, num_items_in_batch: Tensor | None = None) -> Tensor:
        output = self.net(x, labels)
        if num_items_in_batch is None:
            return F.cross_entropy(output, labels)
        return F.cross_entropy(output, labels, reduction="sum") / num_items_in_batch


def counts_items(job: Training) -> list[Step]:
    """transformers' way to accumulate: what all batches of a window have is counted before, over all processes."""
    done, batches = [], job.batches()
    for _ in range(STEPS):
        window = [next(batches) for _ in range(2)]
        mine = sum(len(each[1]) for each in window)
        items = _summed(torch.tensor(float(mine)))
        total = 0.0
        for batch in window:
            loss = job.loss_func(batch, job.model(*batch, items))
            loss.backward()
            total += loss.item()
        job.optim.step()
        job.optim.zero_grad()
        done.append(Step(total))
    return done


def _own(batch: Any, output: Tensor) -> Tensor:
    return output


def _counting() -> Arguments:
    """Only the loop knows that it counts over all processes."""
    return _of(Counting, _own, **({"loss_weight": "sum"} if _several() else {}))()


_WORDS: Mapping[str, Any] = {"dataset": Samples(ROWS, _text)}

STRUCTURES: Mapping[str, Structure] = {
    "dpo": Structure(_of(Preferring, _preference, optim_param_func=_trained, **_WORDS), _plain_loop),
    "grpo": Structure(_of(Language, _policy, **_WORDS), generates),
    "sam": Structure(_of(Net), sharpens),
    "pcgrad": Structure(_of(TwoHeads, _both), projects),
    "clip": Structure(_of(TwoTowers, _contrast), _plain_loop),
    "vq": Structure(_of(Codebook), _plain_loop),
    "swav": Structure(_of(Prototypes, _swapped), normalizes_prototypes),
    "meanflow": Structure(_of(Flow), _plain_loop),
    "act": Structure(_of(Pondering), _plain_loop),
    "dp_sgd": Structure(_of(Net), per_sample),
    "schedule_free": Structure(_of(Net, optim_func=ScheduleFree, optim_args={"lr": 0.1}), schedules_free),
    "lisa": Structure(_of(Net), trains_few_layers),
    "relora": Structure(_of(Adapters, optim_param_func=lambda model: list(model.parameters())), merges_adapters),
    "qat": Structure(_of(Quantized), _plain_loop),
    "forces": Structure(_of(Forces), _plain_loop),
    "packing": Structure(
        _of(Documents, _of_labels, dataset=Samples(ROWS, _document),
            dataloader_args={"batch_size": BATCH, "collate_fn": _packed}, model_input_format="unpack_dict"),
        weighs_labels,
    ),
    "experts": Structure(_of(Mixture), _plain_loop),
    "ema": Structure(_of(Teaching, _follows), follows),
    "optimizer_in_backward": Structure(_of(Net, optim_args={"lr": 0.1}), steps_in_backward),
    "experts_in_backward": Structure(_of(Mixture, optim_args={"lr": 0.1}), steps_in_backward),
    "steps_in_hooks": Structure(_of(Net), steps_in_hooks),
    "clamps_in_hooks": Structure(_of(Net), clamps_in_hooks),
    "centralizes": Structure(_of(Net), centralizes),
    "counted_layers": Structure(_of(CountedLayers), _plain_loop),
    "num_items": Structure(_counting, counts_items),
    "python_random": Structure(_of(Chances), draws),
}  # fmt: skip
