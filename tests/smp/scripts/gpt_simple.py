"""GPT-2, in the shape of the vendor's `train_gpt_simple.py`: tensor and pipeline parallelism, checkpoints."""

import argparse

import smdistributed.modelparallel
import smdistributed.modelparallel.torch as smp
import torch
import torch.nn as nn
from smdistributed.modelparallel.torch.nn import FusedLayerNorm as LayerNorm
from torch import optim
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from transformers import AutoModelForCausalLM, GPT2Config, set_seed
from transformers.trainer_utils import is_main_process

SEED, BATCH, LAYERS, WIDTH, VOCAB, LR = 12345, 8, 4, 12, 40, 0.01


class AnnealingLR:
    """Anneals the learning rate from start to zero along a line."""

    def __init__(self, optimizer, start_lr, end_iter):
        self.optimizer, self.start_lr, self.end_iter = optimizer, start_lr, end_iter
        self.step(0)

    def step(self, step_num=None):
        self.num_iters = self.num_iters + 1 if step_num is None else step_num
        for group in self.optimizer.param_groups:
            group["lr"] = self.start_lr * max(self.end_iter - self.num_iters, 0) / self.end_iter

    def state_dict(self):
        return {"start_lr": self.start_lr, "num_iters": self.num_iters}

    def load_state_dict(self, sd):
        self.start_lr = sd["start_lr"]
        self.step(sd["num_iters"])


def get_param_groups_by_weight_decay(module):
    weight_decay_params, no_weight_decay_params = {"params": []}, {"params": [], "weight_decay": 0.0}
    param_ids = set()
    for module_ in module.modules():
        for n, p in module_._parameters.items():
            if p is not None and id(p) not in param_ids:
                is_kept = isinstance(module_, (LayerNorm, nn.LayerNorm)) or n == "bias"
                (no_weight_decay_params if is_kept else weight_decay_params)["params"].append(p)
                param_ids.add(id(p))
    return weight_decay_params, no_weight_decay_params


@smp.step
def train_step(model, optimizer, input_ids, attention_mask, args):
    output = model(input_ids=input_ids, attention_mask=attention_mask, labels=input_ids)
    loss = output["loss"]
    model.backward(loss)
    return output if args.logits_output else loss


@smp.step
def test_step(model, input_ids, attention_mask):
    return model(input_ids=input_ids, attention_mask=attention_mask, labels=input_ids)["loss"]


def eval_model(model, dataloader, num_batches=2):
    model = model.eval()
    loss = 0.0
    with torch.no_grad():
        for batch_idx, (input_ids, attention_mask) in enumerate(dataloader):
            if batch_idx >= num_batches:
                break
            loss += test_step(model, input_ids, attention_mask).reduce_mean()
    torch.distributed.all_reduce(loss, group=smp.get_dp_process_group())
    return (loss / smp.dp_size() / num_batches).item()


def create_pretraining_dataloader(seed, dp_rank, dp_size):
    input_ids = torch.randint(1, VOCAB, (64, WIDTH), generator=torch.Generator().manual_seed(seed))
    input_ids[:, 1::2] = input_ids[:, ::2]  # something to learn
    dataset = TensorDataset(input_ids, torch.ones_like(input_ids))
    sampler = DistributedSampler(dataset, num_replicas=dp_size, rank=dp_rank, shuffle=False)
    return DataLoader(dataset, batch_size=BATCH // dp_size, sampler=sampler, drop_last=True)


def train(model, optimizer, lr_scheduler, model_config, start_batch_index, total_steps, args):
    model.train()
    dp_rank = smp.dp_rank() if not args.prescaled_batch else smp.rdp_rank()
    dp_size = smp.dp_size() if not args.prescaled_batch else smp.rdp_size()
    train_dataloader = create_pretraining_dataloader(SEED, dp_rank, dp_size)
    val_dataloader = create_pretraining_dataloader(SEED + 1, dp_rank, dp_size)

    def grad_accumulation_boundary(batch_idx):
        return batch_idx % args.gradient_accumulation == args.gradient_accumulation - 1

    set_seed(SEED)
    for batch_idx, (input_ids, attention_mask) in enumerate(train_dataloader):
        if batch_idx < start_batch_index:
            if smp.rank() == 0:
                print(f"Resuming from saved batch index {start_batch_index}, skipping batch {batch_idx}...")
            continue
        if total_steps >= args.max_steps:
            break
        if grad_accumulation_boundary(batch_idx - 1):
            optimizer.zero_grad(set_to_none=True)

        loss_mb = train_step(model, optimizer, input_ids, attention_mask, args)
        if args.logits_output:
            logits = torch.cat(tuple(loss_mb["logits"].outputs), dim=1 if smp.tp_size() > 1 else 0)
            assert logits.shape[-1] == VOCAB
            assert smp.rank() in smp.get_tp_group()
            loss_mb = loss_mb["loss"]
        loss = loss_mb.reduce_mean()
        if grad_accumulation_boundary(batch_idx):
            optimizer.step()
            lr_scheduler.step()

        total_steps += 1
        if smp.rank() == 0:
            print(f"Batch {total_steps - 1} Loss: {loss.item()}")
        if not total_steps % 2:
            val_loss = eval_model(model, val_dataloader)
            if is_main_process(smp.rank()):
                print(f"Batch {total_steps - 1} Validation loss: {val_loss}")
            model = model.train()

        if not (total_steps % args.checkpoint_freq):
            user_content = {
                "cli_args": args.__dict__,
                "total_steps": total_steps,
                "model_config": model_config.to_dict(),
                "start_batch_index": batch_idx + 1,
                "lr_scheduler": lr_scheduler.state_dict(),
            }
            smp.save_checkpoint(
                args.checkpoint_dir,
                tag=f"total_steps{total_steps}",
                partial=True,
                model=model,
                optimizer=optimizer,
                user_content=user_content,
                num_kept_partial_checkpoints=args.num_kept_checkpoints,
            )
    return total_steps


def parse_args():
    parser = argparse.ArgumentParser()
    numbers = dict(
        max_steps=4, save_final_full_model=0, load_partial=0, prescaled_batch=0, checkpoint_sublayers=0,
        tensor_parallel_degree=1, pipeline_parallel_degree=1, microbatches=1, delayed_param=0, gradient_accumulation=1,
        num_kept_checkpoints=5, checkpoint_freq=10000, manual_partition=0,
    )  # fmt: skip
    for name, value in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    for name, value in {"checkpoint-dir": "checkpoints", "model-dir": "model", "logits_output": ""}.items():
        parser.add_argument(f"--{name}", type=str, default=value)
    parser.add_argument("--placement_strategy", type=str, default="cluster")
    return parser.parse_known_args()[0]


def main():
    args = parse_args()
    smp_config = {
        "ddp": True,
        "tensor_parallel_degree": args.tensor_parallel_degree,
        "pipeline_parallel_degree": args.pipeline_parallel_degree,
        "microbatches": args.microbatches,
        "shard_optimizer_state": False,
        "prescaled_batch": args.prescaled_batch > 0,
        "fp16": False,
        "bf16": False,
        "offload_activations": False,
        "delayed_parameter_initialization": args.delayed_param > 0,
        "optimize": "speed",
        "placement_strategy": args.placement_strategy,
        "activation_loading_horizon": 4,
        "skip_tracing": False,
        "auto_partition": not args.manual_partition,
        "default_partition": 0,
        "sharded_data_parallel_degree": 1,
    }
    smp.init(smp_config)
    if smp.rank() == 0:
        print(f"smdistributed.modelparallel version: {smdistributed.modelparallel.__version__}")

    model_config = GPT2Config(
        vocab_size=VOCAB, n_positions=WIDTH, n_embd=16, n_layer=LAYERS, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, use_cache=False, bos_token_id=0, eos_token_id=0, return_dict=True,
    )  # fmt: skip
    set_seed(SEED)
    with smp.model_creation(
        tensor_parallelism=smp.tp_size() > 1,
        dtype=torch.get_default_dtype(),
        attention_in_fp32=False,
        query_key_layer_scaling=False,
        fused_softmax=True,
        fused_dropout=False,
        fused_bias_gelu=True,
    ):
        model = AutoModelForCausalLM.from_config(model_config)
    if torch.cuda.is_available():
        torch.cuda.set_device(smp.local_rank())

    model = smp.DistributedModel(model, trace_device="gpu", backward_passes_per_step=args.gradient_accumulation)
    m = model.get_module()
    transformer_layers = m.transformer.h
    if args.manual_partition:
        for i, c in enumerate(transformer_layers.children()):
            smp.set_partition(c, i * smp.pp_size() // LAYERS)

    param_groups = get_param_groups_by_weight_decay(m)
    optimizer = optim.AdamW(param_groups, betas=(0.9, 0.95), lr=LR, weight_decay=0.01)
    for c in transformer_layers.children():
        for part in (c.attn, c.mlp) if args.checkpoint_sublayers else (c,):
            smp.set_activation_checkpointing(part)
    optimizer = smp.DistributedOptimizer(
        optimizer,
        static_loss_scale=None,
        dynamic_loss_scale=True,
        dynamic_loss_args={"scale_window": 1000, "min_scale": 1, "delayed_shift": 2},
    )
    lr_scheduler = AnnealingLR(optimizer, LR, 100)
    model.register_post_partition_hook(lambda model, optimizer: print("After_partition", model.partitioned))

    total_steps = start_batch_index = 0
    if args.load_partial:
        user_content = smp.resume_from_checkpoint(args.checkpoint_dir, tag=None, partial=True)
        total_steps, start_batch_index = user_content["total_steps"], user_content["start_batch_index"]
        lr_scheduler.load_state_dict(user_content["lr_scheduler"])
    total_steps = train(model, optimizer, lr_scheduler, model_config, start_batch_index, total_steps, args)

    if args.save_final_full_model:
        user_content = {"cli_args": args.__dict__, "total_steps": total_steps, "model_config": model_config.to_dict()}
        smp.save_checkpoint(args.model_dir, tag="fullmodel.pt", partial=False, model=model, user_content=user_content)
    smp.barrier()


if __name__ == "__main__":
    main()
