"""Digits by a convolutional network, in the shape of the vendor's first example: `smp.step`, a scaler, files."""

import argparse
import os

import smdistributed.modelparallel.torch as smp
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Net1(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, 1)
        self.conv2 = nn.Conv2d(8, 8, 3, 1)

    def forward(self, x):
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        return torch.flatten(F.max_pool2d(x, 2), 1)


class Net2(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(8 * 4 * 4, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x):
        return F.log_softmax(self.fc2(F.relu(self.fc1(x))), 1)


class GroupedNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.net1 = Net1()
        self.net2 = Net2()

    def forward(self, x):
        return self.net2(self.net1(x))


@smp.step
def train_step(model, scaler, data, target, args):
    with torch.autocast("cuda", enabled=args.amp > 0 and torch.cuda.is_available()):
        output = model(data)
    loss = F.nll_loss(output, target, reduction="mean")
    model.backward(scaler.scale(loss) if args.amp else loss)
    return output, loss


@smp.step
def test_step(model, data, target):
    output = model(data)
    loss = F.nll_loss(output, target, reduction="sum").item()
    pred = output.argmax(dim=1, keepdim=True)
    correct = pred.eq(target.view_as(pred)).sum().item()
    return loss, correct


def train(model, scaler, device, train_loader, optimizer, args):
    model.train()
    for batch_idx, (data, target) in enumerate(train_loader):
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        _, loss_mb = train_step(model, scaler, data, target, args)
        loss = loss_mb.reduce_mean()
        if args.amp:
            scaler.step(optimizer)
            scaler.update()
        elif len(list(model.local_parameters())) > 0:
            optimizer.step()
        if smp.rank() == 0 and batch_idx % 2 == 0:
            print(f"Train [{batch_idx}/{len(train_loader)}]\tLoss: {loss.item():.6f}")


def test(model, device, test_loader):
    model.eval()
    test_loss = correct = 0
    with torch.no_grad():
        for data, target in test_loader:
            # Of numbers, which are no tensors, a step returns lists.
            loss_batch, correct_batch = test_step(model, data.to(device), target.to(device))
            test_loss += sum(loss_batch)
            correct += sum(correct_batch)
    number = len(test_loader.dataset)
    if smp.mp_rank() == 0 and smp.dp_rank() == 0:
        print(f"Test set: Average loss: {test_loss / number:.6f}, Accuracy: {correct}/{number}")


def digits(number, seed):
    """Samples that can be told apart: a bright row and column for each digit."""
    generator = torch.Generator().manual_seed(seed)
    target = torch.randint(10, (number,), generator=generator)
    data = torch.randn(number, 1, 12, 12, generator=generator)
    data[torch.arange(number), 0, target] += 2.0
    return TensorDataset(data, target)


def main():
    parser = argparse.ArgumentParser(description="MNIST Example")
    parser.add_argument("--amp", type=int, default=0)
    parser.add_argument("--save_full_model", action="store_true", default=False)
    parser.add_argument("--save_partial_model", action="store_true", default=False)
    parser.add_argument("--load", type=str, default="", help="full or partial")
    parser.add_argument("--model-dir", type=str, default=".")
    args, _ = parser.parse_known_args()
    smp.init()
    torch.manual_seed(1)
    if torch.cuda.is_available():
        torch.cuda.set_device(smp.local_rank())
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if smp.local_rank() == 0:
        os.makedirs(args.model_dir, exist_ok=True)
    smp.barrier()

    dataset1, dataset2 = digits(256, 1), digits(80, 2)
    sampler = None
    if smp.dp_size() > 1:
        sampler = DistributedSampler(dataset1, num_replicas=smp.dp_size(), rank=smp.dp_rank(), shuffle=False)
    train_loader = DataLoader(dataset1, batch_size=32 // smp.dp_size(), sampler=sampler, drop_last=True)
    test_loader = DataLoader(dataset2, batch_size=40, drop_last=True)

    model = smp.DistributedModel(GroupedNet())
    scaler = smp.amp.GradScaler()
    optimizer = smp.DistributedOptimizer(optim.Adadelta(model.parameters(), lr=0.4))
    path = os.path.join(args.model_dir, "pt_mnist_checkpoint.pt")
    if args.load:
        checkpoint = smp.load(path, partial=args.load == "partial")
        model.load_state_dict(checkpoint["model_state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer_state_dict"])

    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    train(model, scaler, device, train_loader, optimizer, args)
    test(model, device, test_loader)
    scheduler.step()

    if args.save_partial_model and smp.dp_rank() == 0:
        held = {"model_state_dict": model.local_state_dict(), "optimizer_state_dict": optimizer.local_state_dict()}
        smp.save(held, path, partial=True)
    if args.save_full_model and smp.dp_rank() == 0:
        held = {"model_state_dict": model.state_dict(), "optimizer_state_dict": optimizer.state_dict()}
        smp.save(held, path, partial=False)
    smp.barrier()


if __name__ == "__main__":
    main()
