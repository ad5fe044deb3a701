"""GPT-2, in the shape of the vendor's `train_gpt_simple.py`: tensor and pipeline parallelism, checkpoints."""

import argparse
import math

import smdistributed.modelparallel
import smdistributed.modelparallel.torch as smp
import torch
import torch.nn as nn
import torch.utils.data
import transformers
from smdistributed.modelparallel.torch.nn import FusedLayerNorm as LayerNorm
from torch import optim
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from transformers import AutoModelForCausalLM, GPT2Config, set_seed
from transformers.trainer_utils import is_main_process


class AnnealingLR:
    """Anneals the learning rate from start to zero along a line."""

    def __init__(self, optimizer, start_lr, warmup_iter, total_iters):
        self.optimizer = optimizer
        self.start_lr, self.warmup_iter, self.end_iter = start_lr, warmup_iter, total_iters
        self.num_iters = 0
        self.step(self.num_iters)

    def get_lr(self):
        if self.warmup_iter > 0 and self.num_iters <= self.warmup_iter:
            return float(self.start_lr) * self.num_iters / self.warmup_iter
        return self.start_lr * max(self.end_iter - (self.num_iters - self.warmup_iter), 0) / self.end_iter

    def step(self, step_num=None):
        self.num_iters = self.num_iters + 1 if step_num is None else step_num
        for group in self.optimizer.param_groups:
            group["lr"] = self.get_lr()

    def state_dict(self):
        return {"start_lr": self.start_lr, "num_iters": self.num_iters}

    def load_state_dict(self, sd):
        self.start_lr = sd["start_lr"]
        self.step(sd["num_iters"])


def get_param_groups_by_weight_decay(module):
    weight_decay_params = {"params": []}
    no_weight_decay_params = {"params": [], "weight_decay": 0.0}
    param_ids = set()
    for module_ in module.modules():
        if isinstance(module_, (LayerNorm, nn.LayerNorm)):
            for p in list(module_._parameters.values()):
                if p is not None and id(p) not in param_ids:
                    no_weight_decay_params["params"].append(p)
                    param_ids.add(id(p))
        else:
            for n, p in list(module_._parameters.items()):
                if p is not None and n != "bias" and id(p) not in param_ids:
                    weight_decay_params["params"].append(p)
                    param_ids.add(id(p))
            for n, p in list(module_._parameters.items()):
                if p is not None and n == "bias" and id(p) not in param_ids:
                    no_weight_decay_params["params"].append(p)
                    param_ids.add(id(p))
    return weight_decay_params, no_weight_decay_params


# smdistributed: Define smp.step. Return any tensors needed outside.
@smp.step
def train_step(model, optimizer, input_ids, attention_mask, args):
    if args.logits_output:
        output = model(input_ids=input_ids, attention_mask=attention_mask, labels=input_ids)
        loss = output["loss"]
    else:
        loss = model(input_ids=input_ids, attention_mask=attention_mask, labels=input_ids)["loss"]

    model.backward(loss)

    if args.logits_output:
        return output

    return loss


# smdistributed: Define smp.step. Return any tensors needed outside.
@smp.step
def test_step(model, input_ids, attention_mask):
    loss = model(input_ids=input_ids, attention_mask=attention_mask, labels=input_ids)["loss"]
    return loss


def eval_model(model, dataloader, num_batches):
    model = model.eval()
    n_batches = 0
    loss = 0.0

    with torch.no_grad():
        for batch_idx, input_data in enumerate(dataloader):
            input_ids, attention_mask = input_data
            if batch_idx >= num_batches:
                break

            loss += test_step(model, input_ids, attention_mask).reduce_mean()
            n_batches += 1

    if n_batches > 0:
        torch.distributed.all_reduce(loss, group=smp.get_dp_process_group())
        loss /= smp.dp_size()
        loss /= n_batches
        loss = loss.item()
        ppl = math.exp(loss)
    else:
        loss = -1.0
        ppl = -1.0

    return loss, ppl


def create_pretraining_dataloader(args, batch_size, seed, dp_rank, dp_size):
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(1, args.vocab_size, (64, args.max_context_width), generator=generator)
    input_ids[:, 1::2] = input_ids[:, ::2]  # something to learn
    dataset = TensorDataset(input_ids, torch.ones_like(input_ids))
    sampler = DistributedSampler(dataset, num_replicas=dp_size, rank=dp_rank, shuffle=False)
    return DataLoader(dataset, batch_size=batch_size // dp_size, sampler=sampler, drop_last=True)


def train(model, optimizer, lr_scheduler, model_config, start_batch_index, num_params, total_steps, args):
    model.train()

    dp_rank = smp.dp_rank() if not args.prescaled_batch else smp.rdp_rank()
    dp_size = smp.dp_size() if not args.prescaled_batch else smp.rdp_size()
    train_dataloader = create_pretraining_dataloader(args, args.train_batch_size, args.seed, dp_rank, dp_size)
    val_dataloader = create_pretraining_dataloader(args, args.train_batch_size, args.seed + 1, dp_rank, dp_size)

    def grad_accumulation_boundary(batch_idx):
        return batch_idx % args.gradient_accumulation == args.gradient_accumulation - 1

    def should_record():
        # only record the ranks that in the tp group that contains global rank 0
        if smp.tp_size() > 1:
            tp_group = smp.get_tp_group()
            return 0 in tp_group
        return smp.rank() == 0

    # Set the same seed for computation
    set_seed(args.seed)
    loss_metric = 0
    for batch_idx, input_data in enumerate(train_dataloader):
        if batch_idx < start_batch_index:
            if smp.rank() == 0:
                print(f"Resuming from saved batch index {start_batch_index}, skipping batch {batch_idx}...")
            continue

        input_ids, attention_mask = input_data

        if total_steps >= args.max_steps:
            break

        if grad_accumulation_boundary(batch_idx - 1):
            optimizer.zero_grad(set_to_none=True)

        if args.logits_output:
            train_output = train_step(model, optimizer, input_ids, attention_mask, args)
            loss_mb = train_output["loss"]
            logits_mb = train_output["logits"]
            if smp.tp_size() > 1:
                logits = torch.cat(tuple(logits_mb.outputs), dim=1)
            else:
                logits = torch.cat(tuple(logits_mb.outputs), dim=0)
            assert should_record() is not None
            assert logits.shape[-1] == args.vocab_size
        else:
            # Return value, loss_mb is a StepOutput object
            loss_mb = train_step(model, optimizer, input_ids, attention_mask, args)

        # smdistributed: Average the loss across microbatches.
        loss = loss_mb.reduce_mean()

        if grad_accumulation_boundary(batch_idx):
            if args.fp16:
                optimizer.clip_master_grads(args.grad_clip)

            optimizer.step()
            if not (args.fp16 and optimizer.overflow):
                lr_scheduler.step()

        total_steps += 1
        if smp.rank() == 0 and not total_steps % args.logging_freq:
            print(f"Batch {total_steps - 1} Loss: {loss.item()}")

        # evaluate on validation
        if args.validation_freq and not (total_steps % args.validation_freq):
            model = model.eval()
            val_loss, val_ppl = eval_model(model, val_dataloader, args.validation_batches)
            if is_main_process(smp.rank()):
                print(f"Batch {total_steps - 1} Validation loss: {val_loss}")
                print(f"Batch {total_steps - 1} Validation perplexity: {val_ppl}")
            loss_metric = val_loss
            model = model.train()

        # checkpoint
        if not (total_steps % args.checkpoint_freq):
            user_content = {
                "cli_args": args.__dict__,
                "num_params": num_params,
                "total_steps": total_steps,
                "start_train_path_index": 0,
                "model_config": model_config.to_dict(),
                "start_batch_index": batch_idx + 1,
            }
            user_content["lr_scheduler"] = lr_scheduler.state_dict()
            smp.save_checkpoint(
                args.checkpoint_dir,
                tag=f"total_steps{total_steps}",
                partial=True,
                model=model,
                optimizer=optimizer,
                user_content=user_content,
                num_kept_partial_checkpoints=args.num_kept_checkpoints,
            )

    return total_steps, loss_metric


def parse_args():
    parser = argparse.ArgumentParser()
    numbers = dict(
        train_batch_size=8,
        max_steps=4,
        seed=12345,
        same_seed=1,
        fp16=0,
        bf16=0,
        sharded_data_parallel_degree=1,
        activation_checkpointing=1,
        logging_freq=1,
        save_final_full_model=0,
        load_partial=0,
        load_full=0,
        prescaled_batch=0,
        max_context_width=12,
        vocab_size=40,
        hidden_width=16,
        num_layers=4,
        num_heads=2,
        use_adamw=1,
        checkpoint_sublayers=0,
        tensor_parallel_degree=1,
        pipeline_parallel_degree=1,
        microbatches=1,
        active_microbatches=None,
        shard_optimizer_state=0,
        offload_activations=0,
        delayed_param=0,
        activation_loading_horizon=4,
        skip_tracing=0,
        gradient_accumulation=1,
        num_kept_checkpoints=5,
        checkpoint_freq=10000,
        validation_freq=2,
        validation_batches=2,
        manual_partition=0,
    )
    for name, value in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--grad_clip", default=1.0, type=float)
    parser.add_argument("--weight_decay", default=0.01, type=float)
    parser.add_argument("--checkpoint-dir", type=str, default="checkpoints")
    parser.add_argument("--model-dir", type=str, default="model")
    parser.add_argument("--logits_output", type=str, default="")
    parser.add_argument("--optimize", type=str, default="speed")
    parser.add_argument("--placement_strategy", type=str, default="cluster")
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--warmup", type=float, default=0.01)
    args, _ = parser.parse_known_args()
    return args


def main():
    args = parse_args()

    # any value here is overriden by the config set in notebook when launching the sagemaker job
    smp_config = {
        "ddp": True,
        "tensor_parallel_degree": args.tensor_parallel_degree,
        "pipeline_parallel_degree": args.pipeline_parallel_degree,
        "microbatches": args.microbatches,
        "shard_optimizer_state": args.shard_optimizer_state > 0,
        "prescaled_batch": args.prescaled_batch > 0,
        "fp16": args.fp16 > 0,
        "bf16": args.bf16 > 0,
        "offload_activations": args.offload_activations > 0,
        "delayed_parameter_initialization": args.delayed_param > 0,
        "optimize": args.optimize,
        "placement_strategy": args.placement_strategy,
        "activation_loading_horizon": args.activation_loading_horizon,
        "skip_tracing": args.skip_tracing > 0,
        "auto_partition": False if args.manual_partition else True,
        "default_partition": 0,
        "sharded_data_parallel_degree": args.sharded_data_parallel_degree,
    }
    if args.active_microbatches is not None:
        smp_config["active_microbatches"] = args.active_microbatches

    smp.init(smp_config)

    if smp.rank() == 0:
        print("Arguments:", args.__dict__)
        print(f"Transformers version: {transformers.__version__}")
        print(f"smdistributed.modelparallel version: {smdistributed.modelparallel.__version__}")
        print(f"smdistributed config: {smp_config}")

    model_config = GPT2Config(
        vocab_size=args.vocab_size,
        n_positions=args.max_context_width,
        n_embd=args.hidden_width,
        n_layer=args.num_layers,
        n_head=args.num_heads,
        n_inner=None,
        activation_function="gelu_new",
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        layer_norm_epsilon=1e-05,
        initializer_range=0.02,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
        return_dict=True,
    )

    set_seed(args.seed)

    if args.fp16 and args.bf16:
        raise ValueError("FP16 and BF16 cannot be simultaneously enabled.")
    if args.fp16:
        dtype = torch.float16
    elif args.bf16:
        dtype = torch.bfloat16
    else:
        dtype = torch.get_default_dtype()

    with smp.model_creation(
        tensor_parallelism=smp.tp_size() > 1,
        dtype=dtype,
        attention_in_fp32=False,
        query_key_layer_scaling=False,
        fused_softmax=True,
        fused_dropout=False,
        fused_bias_gelu=True,
    ):
        model = AutoModelForCausalLM.from_config(model_config)

    num_params = sum(p.numel() for p in model.parameters())
    if smp.rank() == 0:
        print(f"# total parameters: {num_params}")

    # smdistributed: Set the device to the GPU ID used by the current process.
    # Input tensors should be transferred to this device.
    if torch.cuda.is_available():
        torch.cuda.set_device(smp.local_rank())

    if not args.same_seed:
        # Set seed by tp_rank to prevent weights from being the same on different tp_ranks
        set_seed(args.seed + smp.tp_rank())

    # smdistributed: Use the DistributedModel container to provide the model
    # to be partitioned across different ranks. For the rest of the script,
    # the returned DistributedModel object should be used in place of
    # the model provided for DistributedModel class instantiation.
    model = smp.DistributedModel(model, trace_device="gpu", backward_passes_per_step=args.gradient_accumulation)

    m = model.get_module()
    transformer_layers = m.transformer.h

    if args.manual_partition:
        # evenly distribute layers across all partitions
        div, rem = divmod(args.num_layers, smp.pp_size())
        get_num_layers = lambda x: div + 1 if x >= smp.pp_size() - rem else div
        assignments = []
        for pp_rank in range(smp.pp_size()):
            nl = get_num_layers(pp_rank)
            print(f"{nl} layers assigned to partition {pp_rank}")
            assignments += [pp_rank for _ in range(nl)]

        for i, c in enumerate(transformer_layers.children()):
            smp.set_partition(c, assignments[i])

    param_groups = get_param_groups_by_weight_decay(m)

    if args.use_adamw > 0:
        optimizer = optim.AdamW(param_groups, betas=(0.9, 0.95), lr=args.lr, weight_decay=args.weight_decay)
    else:
        optimizer = optim.Adam(param_groups, betas=(0.9, 0.95), lr=args.lr, weight_decay=args.weight_decay)

    if args.activation_checkpointing:
        for c in transformer_layers.children():
            if args.checkpoint_sublayers:
                smp.set_activation_checkpointing(c.attn)
                smp.set_activation_checkpointing(c.mlp)
            else:
                smp.set_activation_checkpointing(c)

    optimizer = smp.DistributedOptimizer(
        optimizer,
        static_loss_scale=None,
        dynamic_loss_scale=True,
        dynamic_loss_args={"scale_window": 1000, "min_scale": 1, "delayed_shift": 2},
    )
    lr_scheduler = AnnealingLR(optimizer, args.lr, args.warmup * 100, 100)

    model.register_post_partition_hook(lambda model, optimizer: print("After_partition", model.partitioned))

    # load after wrapping model and optimizer with smp Distributed...
    if args.load_full or args.load_partial:
        partial = not args.load_full
        path = args.checkpoint_dir if partial else args.model_dir
        tag = None if partial else "fullmodel.pt"
        user_content = smp.resume_from_checkpoint(path, tag=tag, partial=partial)
        total_steps = user_content["total_steps"] if partial else 0
        start_batch_index = user_content.get("start_batch_index", 0)
        if "lr_scheduler" in user_content:
            lr_scheduler.load_state_dict(user_content["lr_scheduler"])
    else:
        total_steps = 0
        start_batch_index = 0

    total_steps, loss = train(
        model, optimizer, lr_scheduler, model_config, start_batch_index, num_params, total_steps, args
    )

    if args.save_final_full_model:
        # saves full model at the end
        user_content = {
            "cli_args": args.__dict__,
            "num_params": num_params,
            "total_steps": total_steps,
            "model_config": model_config.to_dict(),
        }
        smp.save_checkpoint(args.model_dir, tag="fullmodel.pt", partial=False, model=model, user_content=user_content)

    smp.barrier()
    if smp.rank() == 0:
        print("SMP training finished successfully")


if __name__ == "__main__":
    main()
