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
        x = self.conv1(x)
        x = F.relu(x)
        x = self.conv2(x)
        x = F.relu(x)
        x = F.max_pool2d(x, 2)
        x = torch.flatten(x, 1)
        return x


class Net2(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(8 * 4 * 4, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x):
        x = self.fc1(x)
        x = F.relu(x)
        x = self.fc2(x)
        output = F.log_softmax(x, 1)
        return output


class GroupedNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.net1 = Net1()
        self.net2 = Net2()

    def forward(self, x):
        x = self.net1(x)
        x = self.net2(x)
        return x


# smdistributed: Define smp.step. Return any tensors needed outside.
@smp.step
def train_step(model, scaler, data, target, args):
    with torch.autocast("cuda", enabled=args.amp > 0 and torch.cuda.is_available()):
        output = model(data)

    loss = F.nll_loss(output, target, reduction="mean")
    scaled_loss = scaler.scale(loss) if args.amp else loss
    model.backward(scaled_loss)
    return output, loss


# smdistributed: Define smp.step for evaluation.
@smp.step
def test_step(model, data, target):
    output = model(data)
    loss = F.nll_loss(output, target, reduction="sum").item()  # sum up batch loss
    pred = output.argmax(dim=1, keepdim=True)  # get the index of the max log-probability
    correct = pred.eq(target.view_as(pred)).sum().item()
    return loss, correct


def train(model, scaler, device, train_loader, optimizer, epoch, args):
    model.train()
    for batch_idx, (data, target) in enumerate(train_loader):
        # smdistributed: Move input tensors to the GPU ID used by the current process,
        # based on the set_device call.
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        # Return value, loss_mb is a StepOutput object
        _, loss_mb = train_step(model, scaler, data, target, args)

        # smdistributed: Average the loss across microbatches.
        loss = loss_mb.reduce_mean()

        if args.amp:
            scaler.step(optimizer)
            scaler.update()
        else:
            # some optimizers like adadelta from PT 1.8 don't like it when optimizer.step is called with no param
            if len(list(model.local_parameters())) > 0:
                optimizer.step()

        if smp.rank() == 0 and batch_idx % args.log_interval == 0:
            print(f"Train Epoch: {epoch} [{batch_idx}/{len(train_loader)}]\tLoss: {loss.item():.6f}")


def test(model, device, test_loader):
    model.eval()
    test_loss = 0
    correct = 0
    with torch.no_grad():
        for batch_idx, (data, target) in enumerate(test_loader):
            # smdistributed: Move input tensors to the GPU ID used by the current process,
            # based on the set_device call.
            data, target = data.to(device), target.to(device)

            # Since test_step returns scalars instead of tensors,
            # test_step decorated with smp.step will return lists instead of StepOutput objects.
            loss_batch, correct_batch = test_step(model, data, target)
            test_loss += sum(loss_batch)
            correct += sum(correct_batch)

    test_loss /= len(test_loader.dataset)
    if smp.mp_rank() == 0 and smp.dp_rank() == 0:
        share = 100.0 * correct / len(test_loader.dataset)
        print(f"Test set: Average loss: {test_loss:.6f}, Accuracy: {correct}/{len(test_loader.dataset)} ({share:.0f}%)")
    return test_loss


def digits(number, seed):
    """Samples that can be told apart: a bright row and column for each digit."""
    generator = torch.Generator().manual_seed(seed)
    target = torch.randint(10, (number,), generator=generator)
    data = torch.randn(number, 1, 12, 12, generator=generator)
    data[torch.arange(number), 0, target] += 2.0
    return TensorDataset(data, target)


def main():
    parser = argparse.ArgumentParser(description="MNIST Example")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--test-batch-size", type=int, default=40)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--gamma", type=float, default=0.7)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log-interval", type=int, default=2)
    parser.add_argument("--amp", type=int, default=0)
    parser.add_argument("--save_full_model", action="store_true", default=False)
    parser.add_argument("--save_partial_model", action="store_true", default=False)
    parser.add_argument("--load", type=str, default="", help="full or partial")
    parser.add_argument("--model-dir", type=str, default=".")
    args, _ = parser.parse_known_args()

    # smdistributed: initialize the backend
    smp.init()

    torch.manual_seed(args.seed)

    # smdistributed: Set the device to the GPU ID used by the current process.
    # Input tensors should be transferred to this device.
    if torch.cuda.is_available():
        torch.cuda.set_device(smp.local_rank())
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    # smdistributed: Download only on a single process per instance.
    if smp.local_rank() == 0:
        os.makedirs(args.model_dir, exist_ok=True)
    smp.barrier()
    dataset1, dataset2 = digits(256, 1), digits(80, 2)

    # smdistributed: Shard the dataset based on data-parallel ranks
    sampler = None
    if smp.dp_size() > 1:
        sampler = DistributedSampler(dataset1, num_replicas=smp.dp_size(), rank=smp.dp_rank(), shuffle=False)
    train_loader = DataLoader(dataset1, batch_size=args.batch_size // smp.dp_size(), sampler=sampler, drop_last=True)
    # smdistributed: Set drop_last=True to ensure that batch size is always divisible
    # by the number of microbatches
    test_loader = DataLoader(dataset2, batch_size=args.test_batch_size, drop_last=True)

    model = GroupedNet()

    # smdistributed: Use the DistributedModel container to provide the model
    # to be partitioned across different ranks. For the rest of the script,
    # the returned DistributedModel object should be used in place of
    # the model provided for DistributedModel class instantiation.
    model = smp.DistributedModel(model)
    scaler = smp.amp.GradScaler()
    optimizer = optim.Adadelta(model.parameters(), lr=args.lr * 4)
    # smdistributed: Use the DistributedOptimizer
    optimizer = smp.DistributedOptimizer(optimizer)

    path = os.path.join(args.model_dir, "pt_mnist_checkpoint.pt")
    if args.load:
        checkpoint = smp.load(path, partial=args.load == "partial")
        model.load_state_dict(checkpoint["model_state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer_state_dict"])

    scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)
    for epoch in range(1, args.epochs + 1):
        train(model, scaler, device, train_loader, optimizer, epoch, args)
        test(model, device, test_loader)
        scheduler.step()

    if args.save_partial_model:
        if smp.dp_rank() == 0:
            model_dict = model.local_state_dict()
            opt_dict = optimizer.local_state_dict()
            smp.save({"model_state_dict": model_dict, "optimizer_state_dict": opt_dict}, path, partial=True)

    if args.save_full_model:
        if smp.dp_rank() == 0:
            model_dict = model.state_dict()
            opt_dict = optimizer.state_dict()
            smp.save({"model_state_dict": model_dict, "optimizer_state_dict": opt_dict}, path, partial=False)

    # Waiting the save checkpoint to be finished before run another allgather_object
    smp.barrier()

    if smp.local_rank() == 0:
        print("Script finished")


if __name__ == "__main__":
    main()
