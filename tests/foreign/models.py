"""Well-known training scripts in small: `SCRIPTS` has for each its models and data, as auto_accelerate takes them, and
its loop. Everything has the same values every time that it is made.

    arguments = SCRIPTS["resnet"].make(processes=2, scale=4)[0]
    status, result, strategy = auto_accelerate(**arguments)
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from tests.foreign import image_models as images
from tests.foreign import loops
from tests.foreign import text_models as texts
from tests.foreign.script import Arguments, Samples, Script, drawn

ROWS, BATCH, VOCAB = 24, 8, 32  # samples of a data set, samples of a global batch, words
IGNORED = -100


def _seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(5)
    return make()


def _arguments(
    make: Callable[[], nn.Module], sample: Callable[[int], Any], loss_func: Any, optim_func: Any,
    optim_args: dict[str, Any], form: str = "unpack_sequence", rows: int = ROWS, **more: Any,
) -> Arguments:  # fmt: skip
    """Of auto_accelerate, for batches of so many samples; `more` goes over them."""
    return {
        "model": _seeded(make),
        "optim_func": optim_func,
        "optim_args": optim_args,
        "dataset": Samples(rows, sample),
        "loss_func": loss_func,
        "model_input_format": form,
        "dataloader_args": {"batch_size": BATCH},
        **more,
    }


def _tokens(index: int, num: int, least: int = 0) -> Tensor:
    return torch.randint(least, VOCAB, (num,), generator=drawn(index))


def _mingpt(processes: int = 1, dropout: float = 0.0, scale: int = 1) -> list[Arguments]:
    """minGPT's demo: sort digits; what is only read does not count."""

    def sample(index: int) -> tuple[Tensor, Tensor]:
        digits = torch.randint(0, 3, (6,), generator=drawn(index))
        both = torch.cat((digits, digits.sort()[0]))
        x, y = both[:-1].clone(), both[1:].clone()
        y[:5] = -1
        return x, y

    return [
        _arguments(
            lambda: texts.MinGPT(3, 16 * scale, 2, 2, 11, dropout), sample, _second, torch.optim.AdamW,
            {"lr": 3e-3, "betas": (0.9, 0.95)}, optim_param_func=texts.mingpt_groups,
        )
    ]  # fmt: skip


def _second(batch: Any, output: Any) -> Tensor:
    return output[1]


def _nanogpt(processes: int = 1, dropout: float = 0.0, scale: int = 1) -> list[Arguments]:
    def sample(index: int) -> tuple[Tensor, Tensor]:
        text = _tokens(index, 17)
        return text[:-1], text[1:]

    return [
        _arguments(
            lambda: texts.NanoGPT(VOCAB, 16 * scale, 2, 2, 16, dropout), sample, _second, texts.fused_adamw,
            {"lr": 3e-3, "betas": (0.9, 0.95)}, optim_param_func=texts.nanogpt_groups,
        )
    ]  # fmt: skip


def _word_language_model(processes: int = 1, dropout: float = 0.0, scale: int = 1) -> list[Arguments]:
    """The text in columns that are read side by side; a sample is the next few words of a column."""
    bptt, pieces = 5, 5
    columns = [_tokens(index, bptt * pieces + 1) for index in range(BATCH)]

    def sample(index: int) -> tuple[Tensor, Tensor]:
        piece, column = divmod(index, BATCH)
        start = piece * bptt
        return columns[column][start : start + bptt], columns[column][start + 1 : start + 1 + bptt]

    return [
        _arguments(
            lambda: texts.RNNModel(VOCAB, 12 * scale, 2, dropout), sample,
            lambda batch, output: F.nll_loss(output[0], batch[1].reshape(-1)), torch.optim.SGD, {"lr": 5.0},
            rows=pieces * BATCH, dataloader_args={"batch_size": BATCH, "collate_fn": _columns},
        )
    ]  # fmt: skip


def _columns(samples: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    data, targets = (torch.stack(each, dim=1) for each in zip(*samples, strict=True))
    return data, targets


def _vae(processes: int = 1, dropout: float = 0.0, scale: int = 1) -> list[Arguments]:
    def sample(index: int) -> dict[str, Tensor]:
        generator = drawn(index)
        return {"x": torch.rand(1, 6, 6, generator=generator), "eps": torch.randn(4, generator=generator)}

    def loss_func(batch: Any, output: Any) -> Tensor:
        recon, mu, logvar = output
        bce = F.binary_cross_entropy(recon, batch["x"].view(-1, 36), reduction="sum")
        return bce - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())

    # The script has Adam, which hides how large gradients are.
    sgd = torch.optim.SGD
    return [_arguments(lambda: images.VAE(36, 32 * scale, 4), sample, loss_func, sgd, {"lr": 1e-4}, form="unpack_dict")]


def _dcgan(processes: int = 1, dropout: float = 0.0, scale: int = 1) -> list[Arguments]:
    """The discriminator, and the generator. Each is told of a pass of its own; the loop puts one behind the other."""
    latent, adam = 6, (torch.optim.Adam, {"lr": 2e-4, "betas": (0.5, 0.999)})
    return [
        _arguments(
            lambda: images.Discriminator(6 * scale).apply(images.dcgan_weights),
            lambda index: (_picture(index)[:1].tanh(), torch.tensor(1.0)),
            lambda batch, output: F.binary_cross_entropy(output, batch[1]), *adam,
        ),
        _arguments(
            lambda: images.Generator(latent, 6 * scale).apply(images.dcgan_weights),
            lambda index: torch.randn(latent, 1, 1, generator=drawn(index)),
            lambda noise, fake: fake.square().mean(), *adam, model_input_format=None,
        ),
    ]  # fmt: skip


def _gcn(processes: int = 1, dropout: float = 0.0, scale: int = 1) -> list[Arguments]:
    """One graph, which is the whole data set: every process has it."""
    nodes, features, classes = 20, 8, 3
    generator = drawn(0)
    links = (torch.rand(nodes, nodes, generator=generator) < 0.2).float()
    links = ((links + links.T + torch.eye(nodes)) > 0).float()
    graph = {
        "x": torch.rand(nodes, features, generator=generator),
        "adj": (links / links.sum(1, keepdim=True)).to_sparse(),
        "labels": torch.randint(0, classes, (nodes,), generator=generator),
        "idx_train": torch.arange(9),
        "idx_val": torch.arange(9, 15),
    }
    return [
        _arguments(
            lambda: texts.GCN(features, 16 * scale, classes, dropout), lambda index: graph,
            lambda graph, output: F.nll_loss(output[graph["idx_train"]], graph["labels"][graph["idx_train"]]),
            torch.optim.Adam, {"lr": 0.01, "weight_decay": 5e-4}, form="unpack_dict", rows=processes,
            prepare_input=lambda graph, device: {name: value.to(device) for name, value in graph.items()},
            dataloader_args={"batch_size": processes, "collate_fn": _only},
        )
    ]  # fmt: skip


def _only(samples: Sequence[Any]) -> Any:
    return samples[0]


def _packed_lstm(processes: int = 1, dropout: float = 0.0, scale: int = 1) -> list[Arguments]:
    def sample(index: int) -> tuple[Tensor, Tensor]:
        length = 3 + int(torch.randint(0, 8, (), generator=drawn(index)))
        return _tokens(index, length, 1), torch.tensor(index % 3)

    def collate(samples: Sequence[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
        text, labels = zip(*samples, strict=True)
        lengths = torch.tensor([len(each) for each in text])
        return {"text": pad_sequence(text, batch_first=True), "lengths": lengths, "labels": torch.stack(labels)}

    return [
        _arguments(
            lambda: texts.PackedTagger(VOCAB, 8 * scale, 3, dropout), sample,
            lambda batch, output: F.cross_entropy(output, batch["labels"]), torch.optim.Adam, {"lr": 1e-2},
            form="unpack_dict", dataloader_args={"batch_size": BATCH, "collate_fn": collate},
        )
    ]  # fmt: skip


def _own_loss(batch: Any, output: Any) -> Tensor:
    return output.loss


def _num_labels(batch: Any) -> float:
    return float((batch["labels"] != IGNORED).sum())


def _bert(processes: int = 1, dropout: float = 0.0, scale: int = 1) -> list[Arguments]:
    """Masked words in sentences of uneven length, padded to the longest of a batch: a mean over the masked ones."""
    from transformers import BertConfig, BertForMaskedLM

    def sample(index: int) -> dict[str, Tensor]:
        words = _tokens(index, 4 + index * 5 % 9, 2)
        masked = torch.rand(len(words), generator=drawn(index)) < (0.8 if index % 2 else 0.2)
        masked[0] = True
        return {"input_ids": words.masked_fill(masked, 1), "labels": words.masked_fill(~masked, IGNORED)}

    def collate(samples: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        ids = pad_sequence([each["input_ids"] for each in samples], batch_first=True)
        labels = pad_sequence([each["labels"] for each in samples], batch_first=True, padding_value=IGNORED)
        return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}

    config = BertConfig(
        vocab_size=VOCAB, hidden_size=16 * scale, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32 * scale, max_position_embeddings=32,
        hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    return [_hugging_face(lambda: BertForMaskedLM(config), sample, collate_fn=collate)]


def _hugging_face(make: Callable[[], nn.Module], sample: Callable[[int], Any], **loader: Any) -> Arguments:
    """A model that knows its own loss, with AdamW and a linear schedule."""
    return _arguments(
        make, sample, _own_loss, torch.optim.AdamW, {"lr": 1e-3, "weight_decay": 0.01}, form="unpack_dict",
        dataloader_args={"batch_size": BATCH, **loader}, lr_scheduler_cls=torch.optim.lr_scheduler.LinearLR,
        lr_scheduler_args={"start_factor": 1.0, "end_factor": 0.1, "total_iters": 10},
    )  # fmt: skip


def _whisper(processes: int = 1, dropout: float = 0.0, scale: int = 1) -> list[Arguments]:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    def sample(index: int) -> dict[str, Tensor]:
        labels = _tokens(index, 6, 3)
        labels[6 - index % 3 :] = IGNORED
        return {"input_features": torch.randn(8, 16, generator=drawn(index)), "labels": labels}

    config = WhisperConfig(
        vocab_size=VOCAB, d_model=16 * scale, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32 * scale, decoder_ffn_dim=32 * scale, num_mel_bins=8,
        max_source_positions=8, max_target_positions=16, dropout=dropout, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, decoder_start_token_id=1, suppress_tokens=[], begin_suppress_tokens=[], use_cache=False,
    )  # fmt: skip
    return [_hugging_face(lambda: WhisperForConditionalGeneration(config), sample)]


def _t5(processes: int = 1, dropout: float = 0.0, scale: int = 1) -> list[Arguments]:
    from transformers import T5Config, T5ForConditionalGeneration

    def sample(index: int) -> dict[str, Tensor]:
        labels = _tokens(index, 5, 2)
        labels[5 - index % 4 :] = IGNORED
        return {"input_ids": _tokens(index, 9, 2), "labels": labels}

    config = T5Config(
        vocab_size=VOCAB, d_model=16 * scale, d_kv=8 * scale, d_ff=32 * scale, num_layers=2, num_heads=2,
        dropout_rate=dropout, decoder_start_token_id=0, pad_token_id=0, use_cache=False,
    )  # fmt: skip
    return [_hugging_face(lambda: T5ForConditionalGeneration(config), sample)]


def _picture(index: int, size: int = 8) -> Tensor:
    return torch.randn(3, size, size, generator=drawn(index))


def _unet(processes: int = 1, dropout: float = 0.0, scale: int = 1) -> list[Arguments]:
    def sample(index: int) -> dict[str, Tensor]:
        mask = (torch.rand(17, 17, generator=drawn(index)) < 0.4).long()
        return {"image": _picture(index, 17), "mask": mask}

    def loss_func(batch: Any, output: Tensor) -> Tensor:
        truth = F.one_hot(batch["mask"], 2).permute(0, 3, 1, 2).float()
        return F.cross_entropy(output, batch["mask"]) + images.dice_loss(F.softmax(output.float(), dim=1), truth)

    return [
        _arguments(
            lambda: images.UNet(3, 2, 4 * scale), sample, loss_func, torch.optim.RMSprop,
            {"lr": 1e-4, "weight_decay": 1e-8, "momentum": 0.9}, form="unpack_dict",
        )
    ]  # fmt: skip


def _of_class(index: int) -> tuple[Tensor, Tensor]:
    """A picture of one of three classes."""
    return _picture(index), torch.tensor(index % 3)


def _resnet(processes: int = 1, dropout: float = 0.0, scale: int = 1) -> list[Arguments]:
    return [
        _arguments(
            lambda: images.ResNet(3, 4 * scale), _of_class, lambda batch, output: F.cross_entropy(output, batch[1]),
            torch.optim.SGD, {"lr": 0.02, "momentum": 0.9, "weight_decay": 1e-4},
            lr_scheduler_cls=torch.optim.lr_scheduler.StepLR, lr_scheduler_args={"step_size": 3, "gamma": 0.1},
        )
    ]  # fmt: skip


def _vit(processes: int = 1, dropout: float = 0.0, scale: int = 1) -> list[Arguments]:
    return [
        _arguments(
            lambda: images.VisionTransformer(8, 2, 2, 2, 16 * scale, 3, dropout), _of_class,
            lambda batch, output: F.cross_entropy(output, batch[1], label_smoothing=0.11),
            torch.optim.AdamW, {"lr": 3e-3, "weight_decay": 0.3},
            lr_scheduler_cls=torch.optim.lr_scheduler.CosineAnnealingLR, lr_scheduler_args={"T_max": 10},
        )
    ]  # fmt: skip


def _timm(processes: int = 1, dropout: float = 0.0, scale: int = 1) -> list[Arguments]:
    """Pictures that were mixed up: the targets are shares of classes."""

    def sample(index: int) -> tuple[Tensor, Tensor]:
        share = torch.rand((), generator=drawn(index))
        one, other = (F.one_hot(torch.tensor(each % 3), 3).float() for each in (index, index // 3))
        return _picture(index), share * one + (1 - share) * other

    def groups(model: nn.Module) -> list[dict[str, Any]]:
        trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
        plain = [name for name, each in trained.items() if each.ndim <= 1 or name.endswith(".bias")]
        return [
            {"params": [trained[name] for name in plain], "weight_decay": 0.0},
            {"params": [each for name, each in trained.items() if name not in plain], "weight_decay": 0.05},
        ]

    return [
        _arguments(
            lambda: images.ConvNeXt(3, 8 * scale, dropout), sample,
            lambda batch, output: torch.sum(-batch[1] * F.log_softmax(output, dim=-1), dim=-1).mean(),
            torch.optim.AdamW, {"lr": 2e-3}, optim_param_func=groups,
        )
    ]  # fmt: skip


SCRIPTS: Mapping[str, Script] = {
    "mingpt": Script(make=_mingpt, train=loops.mingpt, dropout=0.1),
    "nanogpt": Script(make=_nanogpt, train=loops.nanogpt, dropout=0.1),
    "word_language_model": Script(make=_word_language_model, train=loops.word_language_model, dropout=0.2),
    "vae": Script(make=_vae, train=loops.plain_loop("unpack_dict"), loss="sum"),
    "dcgan": Script(make=_dcgan, train=loops.dcgan, across_rows=True),
    "gcn": Script(make=_gcn, train=loops.gcn, dropout=0.5),
    "packed_lstm": Script(make=_packed_lstm, train=loops.plain_loop("unpack_dict"), dropout=0.2),
    "bert": Script(make=_bert, train=loops.plain_loop("unpack_dict", weigh=_num_labels), dropout=0.1),
    "whisper": Script(make=_whisper, train=loops.plain_loop("unpack_dict", 1.0, _num_labels), dropout=0.1),
    "t5": Script(make=_t5, train=loops.plain_loop("unpack_dict", 1.0, _num_labels), dropout=0.1),
    "unet": Script(make=_unet, train=loops.plain_loop("unpack_dict", 1.0), across_rows=True),
    "resnet": Script(make=_resnet, train=loops.plain_loop("first"), across_rows=True),
    "vit": Script(make=_vit, train=loops.plain_loop("first", 1.0), dropout=0.1),
    "timm": Script(make=_timm, train=loops.plain_loop("first"), dropout=0.1),
}
