"""The loops of well-known scripts, with only what auto_accelerate asks for in place of their own."""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F

from tests.foreign.script import Step, Training
from tests.foreign.text_models import repackage_hidden

Loop = Callable[[Sequence[Training], int], list[Step]]

CALLS: Mapping[str, Callable[[Any, Any], Any]] = {
    "first": lambda model, batch: model(batch[0]),  # the pictures, and not what they show
    "unpack_dict": lambda model, batch: model(**batch),
}


def mingpt(jobs: Sequence[Training], steps: int) -> list[Step]:
    """minGPT's Trainer: an iterator that is made again when it ends, gradients cleared before backward, clipping."""
    model, optimizer, train_loader, loss_func, prepare, _, clip = jobs[0][:7]
    device = next(model.parameters()).device
    model.train()
    data_iter, done = iter(train_loader), []
    while len(done) < steps:
        try:
            batch = next(data_iter)
        except StopIteration:
            data_iter = iter(train_loader)
            batch = next(data_iter)
        batch = prepare(batch, device)
        loss = loss_func(batch, model(*batch))
        model.zero_grad(set_to_none=True)
        loss.backward()
        norm = clip(model, 1.0)
        optimizer.step()
        done.append(Step(loss.item(), norm=norm.item()))
    return done


def nanogpt(jobs: Sequence[Training], steps: int, accumulated: int = 2) -> list[Step]:
    """nanoGPT's train.py: the learning rate by hand, micro-steps with the next batch fetched ahead, clipping."""
    model, optimizer, _, loss_func, _, _, clip = jobs[0][:7]
    batches, done = jobs[0].batches(), []
    batch = next(batches)
    for it in range(steps):
        lr = _cosine(it, 2, steps, 3e-3, 3e-4)
        for param_group in optimizer.param_groups:
            param_group["lr"] = lr
        total = 0.0
        for _ in range(accumulated):
            loss = loss_func(batch, model(*batch)) / accumulated
            batch = next(batches)
            loss.backward()
            total += loss.item()
        norm = clip(model, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        done.append(Step(total, norm=norm.item()))
    return done


def _cosine(it: int, warmup: int, decay: int, highest: float, least: float) -> float:
    if it < warmup:
        return highest * (it + 1) / (warmup + 1)
    if it > decay:
        return least
    return least + 0.5 * (1.0 + math.cos(math.pi * (it - warmup) / (decay - warmup))) * (highest - least)


def word_language_model(jobs: Sequence[Training], steps: int) -> list[Step]:
    """The hidden state carried over the batches of an epoch, clipping, evaluation, and annealing by its loss."""
    model, optimizer, train_data, loss_func, prepare, _, clip = jobs[0][:7]
    device, done, best = next(model.parameters()).device, [], None
    while len(done) < steps:
        model.train()
        hidden = None
        for batch in train_data:
            batch = prepare(batch, device)
            data = batch[0]
            hidden = model.init_hidden(data.size(1)) if hidden is None else repackage_hidden(hidden)
            model.zero_grad()
            output, hidden = model(data, hidden=hidden)
            loss = loss_func(batch, (output, hidden))
            loss.backward()
            norm = clip(model, 0.25)
            optimizer.step()
            done.append(Step(loss.item(), norm=norm.item()))
        value = _evaluated(jobs[0], device)
        if best is None or value < best:
            best = value
        else:
            for param_group in optimizer.param_groups:
                param_group["lr"] /= 4.0
    return done[:steps]


def _evaluated(job: Training, device: Any) -> float:
    model, _, data, loss_func, prepare = job[:5]
    model.eval()
    total, hidden = 0.0, None
    with torch.no_grad():
        for batch in islice(data, 2):
            batch = prepare(batch, device)
            hidden = model.init_hidden(batch[0].size(1)) if hidden is None else hidden
            output, hidden = model(batch[0], hidden=hidden)
            hidden = repackage_hidden(hidden)
            total += len(batch[0]) * loss_func(batch, (output, hidden)).item()
    return total


def plain_loop(call: str, max_norm: float | None = None, weigh: Callable[[Any], float] = lambda batch: 1.0) -> Loop:
    """The loop of most scripts: clear, forward, loss, backward, perhaps clip, step, and a scheduler where there is one.

    weigh: what this process's loss counts in the mean over processes, of a batch.
    """

    def train(jobs: Sequence[Training], steps: int) -> list[Step]:
        model, optimizer, _, loss_func, _, scheduler, clip = jobs[0][:7]
        model.train()
        done = []
        for batch in islice(jobs[0].batches(), steps):
            optimizer.zero_grad()
            loss = loss_func(batch, CALLS[call](model, batch))
            loss.backward()
            norm = _seen(jobs[0], len(done)) if max_norm is None else clip(model, max_norm).item()
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            done.append(Step(loss.item(), weigh(batch), norm))
        return done

    return train


def _seen(job: Training, step: int) -> float | None:
    """The norm of the gradients, in a loop that does not clip: of every second step, so that others go by unseen."""
    return job.clip(job.model, math.inf).item() if step % 2 else None


def dcgan(jobs: Sequence[Training], steps: int) -> list[Step]:
    """DCGAN's main.py: two backward passes of the discriminator, then one of the generator through it."""
    (net_d, optimizer_d, _, criterion, *_), (net_g, optimizer_g, *_) = jobs
    images, noises = jobs[0].batches(), jobs[1].batches()
    done: list[Step] = []
    while len(done) < 2 * steps:
        # (1) Update D network: maximize log(D(x)) + log(1 - D(G(z)))
        net_d.zero_grad()
        real, label = next(images)
        error_real = criterion((real, label), net_d(real))
        error_real.backward()
        fake = net_g(next(noises))
        label = torch.full((real.size(0),), 0.0, dtype=real.dtype, device=real.device)
        error_fake = criterion((fake, label), net_d(fake.detach()))
        error_fake.backward()
        norm_d = _seen(jobs[0], len(done) // 2)
        optimizer_d.step()
        # (2) Update G network: maximize log(D(G(z)))
        net_g.zero_grad()
        label.fill_(1.0)
        error_g = criterion((fake, label), net_d(fake))
        error_g.backward()
        norm_g = _seen(jobs[1], len(done) // 2)
        optimizer_g.step()
        done += [Step((error_real + error_fake).item(), norm=norm_d), Step(error_g.item(), norm=norm_g)]
    return done


def gcn(jobs: Sequence[Training], steps: int) -> list[Step]:
    """pygcn's train.py: each epoch is one step on the whole graph, and an evaluation without dropout."""
    model, optimizer, _, loss_func = jobs[0][:4]
    done = []
    for graph in islice(jobs[0].batches(), steps):
        model.train()
        optimizer.zero_grad()
        output = model(graph["x"], graph["adj"])
        loss = loss_func(graph, output)
        loss.backward()
        norm = _seen(jobs[0], len(done) // 2)
        optimizer.step()
        model.eval()
        output = model(graph["x"], graph["adj"])
        valid = F.nll_loss(output[graph["idx_val"]], graph["labels"][graph["idx_val"]])
        done += [Step(loss.item(), norm=norm), Step(valid.item())]
    return done
