"""BERT's pre-training, in the shape of the vendor's example: a criterion of its own, LAMB, checkpoints by mp rank."""

import argparse
import math
import os
import random

import numpy as np
import smdistributed.modelparallel.torch as smp
import torch
from smdistributed.modelparallel.torch.optimizers import FusedLamb as FusedLAMB
from torch.optim.lr_scheduler import _LRScheduler
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from transformers import BertConfig
from transformers import BertForPreTraining as Bert


class BertForPreTraining(Bert):
    """With the outputs of the original script's own modeling code."""

    def forward(self, input_ids, token_type_ids, attention_mask):
        outputs = super().forward(input_ids=input_ids, token_type_ids=token_type_ids, attention_mask=attention_mask)
        return outputs.prediction_logits, outputs.seq_relationship_logits


class BertPretrainingCriterion(torch.nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.loss_fn = torch.nn.CrossEntropyLoss(ignore_index=-1)
        self.vocab_size = vocab_size

    def forward(self, prediction_scores, seq_relationship_score, masked_lm_labels, next_sentence_labels):
        masked_lm_loss = self.loss_fn(prediction_scores.view(-1, self.vocab_size), masked_lm_labels.view(-1))
        next_sentence_loss = self.loss_fn(seq_relationship_score.view(-1, 2), next_sentence_labels.view(-1))
        total_loss = masked_lm_loss + next_sentence_loss
        return total_loss


class PolyWarmUpScheduler(_LRScheduler):
    """Applies a warm up period to the learning rate."""

    def __init__(self, optimizer, warmup, total_steps, degree=0.5, last_epoch=-1):
        self.warmup = warmup
        self.total_steps = total_steps
        self.degree = degree
        super().__init__(optimizer, last_epoch)

    def step(self, epoch=None):
        param_group = self.optimizer.param_groups[0]
        if "step" in param_group:
            self.last_epoch = param_group["step"] + 1
        else:
            self.last_epoch = 1

        for param_group, lr in zip(self.optimizer.param_groups, self.get_lr()):
            param_group["lr"] = lr

    def get_lr(self):
        progress = self.last_epoch / self.total_steps
        if progress < self.warmup:
            return [base_lr * progress / self.warmup for base_lr in self.base_lrs]
        return [base_lr * (max(1.0 - progress, 0.0) ** self.degree) for base_lr in self.base_lrs]


def pretraining_dataset(args):
    generator = torch.Generator().manual_seed(5)
    shape = (args.samples, args.max_seq_length)
    input_ids = torch.randint(4, args.vocab_size, shape, generator=generator)
    segment_ids = (torch.arange(shape[1]) >= shape[1] // 2).long().expand(shape).contiguous()
    input_mask = torch.ones(shape, dtype=torch.long)
    input_mask[:, -2:] = 0
    masked_lm_labels = torch.full(shape, -1)
    masked_lm_labels[:, 1:4] = input_ids[:, 1:4]
    input_ids[:, 1:4] = 3
    next_sentence_labels = torch.randint(2, (shape[0],), generator=generator)
    return TensorDataset(input_ids, segment_ids, input_mask, masked_lm_labels, next_sentence_labels)


def is_main_process():
    return smp.rank() == 0


def setup_training(args):
    # Initialize SMP. The configuration is obtained from the parameters passed to
    # the Sagemaker PyTorch estimator.
    smp.init()

    # SMP: Set the device to the GPU ID used by the current process.
    # Input tensors should be transferred to this device.
    if torch.cuda.is_available():
        torch.cuda.set_device(smp.local_rank())
        device = torch.device("cuda", smp.local_rank())
    else:
        device = torch.device("cpu")
    args.n_gpu = 1
    print(f"device: {device} n_gpu: {args.n_gpu}, mp_rank: {smp.mp_rank()}, rank: {smp.rank()}")
    if is_main_process():
        os.makedirs(args.output_dir, exist_ok=True)
    return device, args


def prepare_model_and_optimizer(args, device):
    # Prepare model
    config = BertConfig(
        vocab_size=args.vocab_size,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=args.max_seq_length,
        hidden_dropout_prob=args.dropout,
        attention_probs_dropout_prob=args.dropout,
    )
    model = BertForPreTraining(config)
    # SMP: Use the DistributedModel container to provide the model
    # to be partitioned across different ranks. For the rest of the script,
    # the returned DistributedModel object should be used in place of
    # the model provided for DistributedModel class instantiation.
    model = smp.DistributedModel(model)

    checkpoint = None
    global_step = 0
    if args.resume_from_checkpoint:
        smp.barrier()
        model_names = [f for f in os.listdir(args.output_dir) if ".pt" in f]
        args.resume_step = max([int(x.split(".pt")[0].split("_")[1].strip()) for x in model_names])
        global_step = args.resume_step

        # SMP: Load a model that was saved with smp.save
        checkpoint = smp.load(os.path.join(args.output_dir, f"ckpt_{global_step}.pt"), partial=args.partial_checkpoint)
        model.load_state_dict(checkpoint["model"], strict=False)
        if is_main_process():
            print("resume step from ", args.resume_step)

    model.to(device)
    param_optimizer = list(model.named_parameters())
    no_decay = ["bias", "gamma", "beta", "LayerNorm"]
    optimizer_grouped_parameters = [
        {"params": [p for n, p in param_optimizer if not any(nd in n for nd in no_decay)], "weight_decay": 0.01},
        {"params": [p for n, p in param_optimizer if any(nd in n for nd in no_decay)], "weight_decay": 0.0},
    ]

    optimizer = FusedLAMB(optimizer_grouped_parameters, lr=args.learning_rate)
    # SMP: Use Distributed Optimizer which allows the loading of optimizer state for a distributed model
    # Also provides APIs to obtain local optimizer state for the current mp_rank.
    optimizer = smp.DistributedOptimizer(optimizer)
    lr_scheduler = PolyWarmUpScheduler(optimizer, warmup=args.warmup_proportion, total_steps=args.max_steps)

    if args.resume_from_checkpoint:
        # Override hyperparameters from previous checkpoint
        for iter, item in enumerate(checkpoint["optimizer"]["param_groups"]):
            checkpoint["optimizer"]["param_groups"][iter]["step"] = global_step
            checkpoint["optimizer"]["param_groups"][iter]["t_total"] = args.max_steps
            checkpoint["optimizer"]["param_groups"][iter]["warmup"] = args.warmup_proportion
            checkpoint["optimizer"]["param_groups"][iter]["lr"] = args.learning_rate
        optimizer.load_state_dict(checkpoint["optimizer"])

    criterion = BertPretrainingCriterion(config.vocab_size)

    return model, optimizer, lr_scheduler, checkpoint, global_step, criterion


def take_optimizer_step(args, optimizer, model, global_step):
    optimizer.step()
    for param in model.parameters():
        param.grad = None
    global_step += 1
    return global_step


# SMP: Define smp step. Pass the necessary arguments for the train_step call
# and return any tensors needed outside
@smp.step
def smp_step(
    args, device, input_ids, segment_ids, input_mask, masked_lm_labels, next_sentence_labels, model, optimizer,
    criterion, step,
):  # fmt: skip
    rval = train_step(
        args, device, input_ids, segment_ids, input_mask, masked_lm_labels, next_sentence_labels, model, optimizer,
        criterion, step,
    )  # fmt: skip
    return rval


def train_step(
    args, device, input_ids, segment_ids, input_mask, masked_lm_labels, next_sentence_labels, model, optimizer,
    criterion, step,
):  # fmt: skip
    prediction_scores, seq_relationship_score = model(
        input_ids=input_ids, token_type_ids=segment_ids, attention_mask=input_mask
    )
    loss = criterion(prediction_scores, seq_relationship_score, masked_lm_labels, next_sentence_labels)
    if args.n_gpu > 1:
        loss = loss.mean()  # mean() to average on multi-gpu.
    if args.fp16:
        raise NotImplementedError
    model.backward(loss)
    return loss


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", default="results", type=str)
    parser.add_argument("--train_batch_size", default=8, type=int)
    parser.add_argument("--learning_rate", default=5e-2, type=float)
    parser.add_argument("--max_steps", default=12, type=int)
    parser.add_argument("--steps_this_run", default=4, type=int)
    parser.add_argument("--num_steps_per_checkpoint", default=2, type=int)
    parser.add_argument("--warmup_proportion", default=0.1, type=float)
    parser.add_argument("--max_seq_length", default=10, type=int)
    parser.add_argument("--vocab_size", default=40, type=int)
    parser.add_argument("--samples", default=96, type=int)
    parser.add_argument("--dropout", default=0.0, type=float)
    parser.add_argument("--seed", default=42, type=int)
    parser.add_argument("--fp16", default=0, type=int)
    parser.add_argument("--partial_checkpoint", default=1, type=int)
    parser.add_argument("--resume_from_checkpoint", action="store_true")
    args, _ = parser.parse_known_args()

    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    device, args = setup_training(args)

    # Prepare optimizer
    model, optimizer, lr_scheduler, checkpoint, global_step, criterion = prepare_model_and_optimizer(args, device)

    dpsize, dprank = smp.dp_size(), smp.dp_rank()
    train_data = pretraining_dataset(args)
    train_sampler = DistributedSampler(train_data, dpsize, dprank, shuffle=False)
    train_dataloader = DataLoader(
        train_data, sampler=train_sampler, batch_size=args.train_batch_size // dpsize, drop_last=True
    )
    most_recent_ckpts_paths = []
    average_loss = 0.0
    skipped = checkpoint["files"][0] if checkpoint else 0

    for step, batch in enumerate(train_dataloader):
        if step < skipped:
            continue
        batch = [t.to(device) for t in batch]
        input_ids, segment_ids, input_mask, masked_lm_labels, next_sentence_labels = batch
        model.train()
        loss_mbs = smp_step(
            args, device, input_ids, segment_ids, input_mask, masked_lm_labels, next_sentence_labels, model, optimizer,
            criterion, step,
        )  # fmt: skip
        loss = loss_mbs.reduce_mean()
        average_loss = loss.detach().clone()
        torch.distributed.all_reduce(average_loss, group=smp.get_world_process_group())
        average_loss /= smp.size()
        if smp.rank() == 0:
            print(f"Loss: {average_loss.item():.6f}")
        assert math.isfinite(loss.item())

        lr_scheduler.step()  # learning rate warmup
        global_step = take_optimizer_step(args, optimizer, model, global_step)

        if global_step % args.num_steps_per_checkpoint == 0:
            if smp.dp_rank() == 0:
                output_save_file = os.path.join(args.output_dir, f"ckpt_{global_step}.pt")
                save_dict = {
                    "model": model.local_state_dict(),
                    "optimizer": optimizer.local_state_dict(),
                    "files": [step + 1],
                    "epoch": 0,
                    "data_loader": None,
                }
                # SMP: Checkpoint mp_rank specific state
                smp.save(save_dict, output_save_file, partial=True)

                most_recent_ckpts_paths.append(output_save_file)
                if len(most_recent_ckpts_paths) > 3 and smp.dp_rank() == 0:
                    ckpt_to_be_removed = most_recent_ckpts_paths.pop(0)
                    os.remove(ckpt_to_be_removed + f"_{smp.mp_rank()}")
        if global_step >= args.steps_this_run:
            smp.barrier()
            break


if __name__ == "__main__":
    main()
