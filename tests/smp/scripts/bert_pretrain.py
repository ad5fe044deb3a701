"""BERT's pre-training, in the shape of the vendor's example: a criterion of its own, LAMB, checkpoints by mp rank."""

import argparse
import os

import smdistributed.modelparallel.torch as smp
import torch
from smdistributed.modelparallel.torch.optimizers import FusedLamb as FusedLAMB
from torch.optim.lr_scheduler import _LRScheduler
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from transformers import BertConfig
from transformers import BertForPreTraining as Bert

LR, WARMUP, MAX_STEPS, BATCH, SAMPLES, LENGTH, VOCAB = 5e-2, 0.1, 12, 8, 96, 10, 40


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
        return masked_lm_loss + next_sentence_loss


class PolyWarmUpScheduler(_LRScheduler):
    """Applies a warm up period to the learning rate; its step is the optimizer's own."""

    def step(self, epoch=None):
        self.last_epoch = self.optimizer.param_groups[0].get("step", 0) + 1
        for param_group, lr in zip(self.optimizer.param_groups, self.get_lr()):
            param_group["lr"] = lr

    def get_lr(self):
        progress = self.last_epoch / MAX_STEPS
        factor = progress / WARMUP if progress < WARMUP else max(1.0 - progress, 0.0) ** 0.5
        return [base_lr * factor for base_lr in self.base_lrs]


def pretraining_dataset():
    generator = torch.Generator().manual_seed(5)
    shape = (SAMPLES, LENGTH)
    input_ids = torch.randint(4, VOCAB, shape, generator=generator)
    segment_ids = (torch.arange(LENGTH) >= LENGTH // 2).long().expand(shape).contiguous()
    input_mask = torch.ones(shape, dtype=torch.long)
    input_mask[:, -2:] = 0
    masked_lm_labels = torch.full(shape, -1)
    masked_lm_labels[:, 1:4] = input_ids[:, 1:4]
    input_ids[:, 1:4] = 3
    next_sentence_labels = torch.randint(2, (SAMPLES,), generator=generator)
    return TensorDataset(input_ids, segment_ids, input_mask, masked_lm_labels, next_sentence_labels)


def prepare_model_and_optimizer(args, device):
    config = BertConfig(
        vocab_size=VOCAB, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=LENGTH, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = smp.DistributedModel(BertForPreTraining(config))

    checkpoint, global_step = None, 0
    if args.resume_from_checkpoint:
        smp.barrier()
        model_names = [f for f in os.listdir(args.output_dir) if ".pt" in f]
        global_step = max([int(x.split(".pt")[0].split("_")[1].strip()) for x in model_names])
        checkpoint = smp.load(os.path.join(args.output_dir, f"ckpt_{global_step}.pt"), partial=True)
        model.load_state_dict(checkpoint["model"], strict=False)
        if smp.rank() == 0:
            print("resume step from ", global_step)

    model.to(device)
    no_decay = ["bias", "gamma", "beta", "LayerNorm"]
    decays = {n: not any(nd in n for nd in no_decay) for n, _ in model.named_parameters()}
    optimizer_grouped_parameters = [
        {"params": [p for n, p in model.named_parameters() if decays[n]], "weight_decay": 0.01},
        {"params": [p for n, p in model.named_parameters() if not decays[n]], "weight_decay": 0.0},
    ]
    optimizer = smp.DistributedOptimizer(FusedLAMB(optimizer_grouped_parameters, lr=LR))
    lr_scheduler = PolyWarmUpScheduler(optimizer)
    if checkpoint:
        # Override hyperparameters from previous checkpoint
        for item in checkpoint["optimizer"]["param_groups"]:
            item.update(step=global_step, t_total=MAX_STEPS, warmup=WARMUP, lr=LR)
        optimizer.load_state_dict(checkpoint["optimizer"])
    return model, optimizer, lr_scheduler, checkpoint, global_step, BertPretrainingCriterion(VOCAB)


@smp.step
def smp_step(
    args, device, input_ids, segment_ids, input_mask, masked_lm_labels, next_sentence_labels, model, optimizer,
    criterion, step,
):  # fmt: skip
    prediction_scores, seq_relationship_score = model(
        input_ids=input_ids, token_type_ids=segment_ids, attention_mask=input_mask
    )
    loss = criterion(prediction_scores, seq_relationship_score, masked_lm_labels, next_sentence_labels)
    model.backward(loss)
    return loss


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", default="results", type=str)
    parser.add_argument("--steps_this_run", default=4, type=int)
    parser.add_argument("--resume_from_checkpoint", action="store_true")
    args, _ = parser.parse_known_args()

    torch.manual_seed(42)
    smp.init()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        torch.cuda.set_device(smp.local_rank())
        device = torch.device("cuda", smp.local_rank())
    if smp.rank() == 0:
        os.makedirs(args.output_dir, exist_ok=True)
    model, optimizer, lr_scheduler, checkpoint, global_step, criterion = prepare_model_and_optimizer(args, device)

    train_data = pretraining_dataset()
    train_sampler = DistributedSampler(train_data, smp.dp_size(), smp.dp_rank(), shuffle=False)
    train_dataloader = DataLoader(train_data, sampler=train_sampler, batch_size=BATCH // smp.dp_size(), drop_last=True)
    most_recent_ckpts_paths = []
    skipped = checkpoint["files"][0] if checkpoint else 0

    for step, batch in enumerate(train_dataloader):
        if step < skipped:
            continue
        model.train()
        loss_mbs = smp_step(args, device, *(t.to(device) for t in batch), model, optimizer, criterion, step)
        average_loss = loss_mbs.reduce_mean().detach().clone()
        torch.distributed.all_reduce(average_loss, group=smp.get_world_process_group())
        if smp.rank() == 0:
            print(f"Loss: {average_loss.item() / smp.size():.6f}")

        lr_scheduler.step()  # learning rate warmup
        optimizer.step()
        for param in model.parameters():
            param.grad = None
        global_step += 1

        if global_step % 2 == 0 and smp.dp_rank() == 0:
            output_save_file = os.path.join(args.output_dir, f"ckpt_{global_step}.pt")
            save_dict = {
                "model": model.local_state_dict(),
                "optimizer": optimizer.local_state_dict(),
                "files": [step + 1],
                "epoch": 0,
                "data_loader": None,
            }
            smp.save(save_dict, output_save_file, partial=True)
            most_recent_ckpts_paths.append(output_save_file)
            if len(most_recent_ckpts_paths) > 3:
                os.remove(most_recent_ckpts_paths.pop(0) + f"_{smp.mp_rank()}")
        if global_step >= args.steps_this_run:
            smp.barrier()
            break


if __name__ == "__main__":
    main()
