"""Models and losses of training scripts that public reports are about."""

import random
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import jvp

STEPS, ROWS, BATCH, WIDTH, TOKENS, WORDS = 5, 40, 8, 12, 6, 17


IGNORED = -100


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


def several() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1


def summed(value: Tensor) -> Tensor:
    if several():
        dist.all_reduce(value)
    return value


def gathered(value: Tensor) -> Tensor:
    return torch.cat(differentiable.all_gather(value)) if several() else value


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
    """Log-ratios to itself without adapters, which is the reference of preference optimization."""

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


def preference(batch: Any, output: Tensor) -> Tensor:
    return -F.logsigmoid(output).mean()


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [each for each in model.parameters() if each.requires_grad]


def policy(batch: Any, output: Tensor) -> Tensor:
    words, worth = batch
    if not worth.is_floating_point():  # of the loader: tried before there is a worth
        worth = worth.float().mean(1)
    likelihood = -F.cross_entropy(output[:, :-1].transpose(1, 2), words[:, 1:], reduction="none")
    return -(likelihood.mean(1) * worth).mean()


class TwoHeads(Net):
    """Two tasks on one trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        found = self.features(x)
        return self.head(found), self.other(found)


def both(batch: Any, output: Any) -> Any:
    one, other = F.cross_entropy(output[0], batch[1]), output[1].square().mean()
    return one + other, one, other


class TwoTowers(nn.Module):
    """CLIP's: features of either side, of length one."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = (nn.Sequential(nn.Linear(5, WIDTH), Block(), Block()) for _ in range(2))

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        return F.normalize(self.one(x), dim=-1), F.normalize(self.other(x.flip(1)), dim=-1)


def contrast(batch: Any, output: Any) -> Tensor:
    logits = 5 * gathered(output[0]) @ gathered(output[1]).T
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
                sums, counts = summed(hot.T @ z), summed(hot.sum(0))
                self.codes.lerp_(torch.where(counts[:, None] > 0, sums / counts.clamp_min(1)[:, None], self.codes), 0.3)
        return x + z + (found - z).detach()


class Codebook(Net):
    block = Quantizing


class Prototypes(Net):
    """SwAV's: assignments to prototypes, balanced over all processes without gradient."""

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        return self.head(F.normalize(self.features(x), dim=-1)), self.head(F.normalize(self.features(x * 0.9), dim=-1))


def swapped(batch: Any, output: Any) -> Tensor:
    def assigned(scores: Tensor) -> Tensor:
        with torch.no_grad():
            q = (scores / 0.3).exp().T
            q = q / summed(q.sum())
            for _ in range(3):
                q = q / summed(q.sum(1, keepdim=True)) / len(q)
                q = q / q.sum(0, keepdim=True)
        return q.T

    one, other = output
    losses = [-(assigned(a) * F.log_softmax(b / 0.3, -1)).sum(1).mean() for a, b in ((one, other), (other, one))]
    return (losses[0] + losses[1]) / 2


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


def follows_teacher(batch: Any, output: Any) -> Tensor:
    return F.cross_entropy(output[0], batch[1]) + F.mse_loss(output[1], output[2])


class Documents(Language):
    """Documents one after another in one row."""

    def forward(self, input_ids: Tensor, labels: Tensor, position_ids: Tensor) -> Tensor:
        hidden = self.embed(input_ids) + 0.1 * torch.cos(position_ids[..., None] * torch.arange(1, WIDTH + 1))
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def of_labels(batch: Any, output: Tensor) -> Tensor:
    return F.cross_entropy(output[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=IGNORED)


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


def own_loss(batch: Any, output: Tensor) -> Tensor:
    return output
