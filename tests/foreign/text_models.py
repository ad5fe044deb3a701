"""Models of text and of a graph: minGPT, nanoGPT, the word language model, packed LSTM and GCN, written afresh."""

import inspect
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class NewGELU(nn.Module):
    """The form of GELU that GPT-2 has."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


class CausalSelfAttention(nn.Module):
    """Attention of heads over what came before, written out, with its mask in a buffer."""

    def __init__(self, width: int, heads: int, block_size: int, dropout: float, bias: bool = True) -> None:
        super().__init__()
        self.c_attn = nn.Linear(width, 3 * width, bias=bias)
        self.c_proj = nn.Linear(width, width, bias=bias)
        self.attn_dropout, self.resid_dropout = nn.Dropout(dropout), nn.Dropout(dropout)
        mask = torch.tril(torch.ones(block_size, block_size)).view(1, 1, block_size, block_size)
        self.register_buffer("bias", mask)
        self.n_head, self.n_embd = heads, width

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, width = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (each.view(batch, seq, self.n_head, width // self.n_head).transpose(1, 2) for each in (q, k, v))
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :seq, :seq] == 0, float("-inf"))
        att = self.attn_dropout(F.softmax(att, dim=-1))
        return self.resid_dropout(self.c_proj((att @ v).transpose(1, 2).contiguous().view(batch, seq, width)))


class MinGPTBlock(nn.Module):
    """A block whose MLP is a ModuleDict that a lambda runs: it reaches its submodules by another road."""

    def __init__(self, width: int, heads: int, block_size: int, dropout: float) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = CausalSelfAttention(width, heads, block_size, dropout)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = nn.ModuleDict(
            {
                "c_fc": nn.Linear(width, 4 * width),
                "c_proj": nn.Linear(4 * width, width),
                "act": NewGELU(),
                "dropout": nn.Dropout(dropout),
            }
        )
        m = self.mlp
        self.mlpf = lambda x: m.dropout(m.c_proj(m.act(m.c_fc(x))))  # MLP forward

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlpf(self.ln_2(x))


class MinGPT(nn.Module):
    """Returns logits and, where targets are given, the loss; targets of -1 do not count."""

    def __init__(self, vocab: int, width: int, heads: int, layers: int, block_size: int, dropout: float) -> None:
        super().__init__()
        self.block_size = block_size
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(vocab, width),
                "wpe": nn.Embedding(block_size, width),
                "drop": nn.Dropout(dropout),
                "h": nn.ModuleList([MinGPTBlock(width, heads, block_size, dropout) for _ in range(layers)]),
                "ln_f": nn.LayerNorm(width),
            }
        )
        self.lm_head = nn.Linear(width, vocab, bias=False)
        self.apply(_normal)
        for name, parameter in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(parameter, mean=0.0, std=0.02 / math.sqrt(2 * layers))

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        device, (_, seq) = idx.device, idx.size()
        assert seq <= self.block_size
        pos = torch.arange(0, seq, dtype=torch.long, device=device).unsqueeze(0)
        x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(pos))
        for block in self.transformer.h:
            x = block(x)
        logits = self.lm_head(self.transformer.ln_f(x))
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return logits, loss

    @torch.no_grad()
    def generate(self, idx: Tensor, max_new_tokens: int) -> Tensor:
        for _ in range(max_new_tokens):
            logits, _ = self(idx if idx.size(1) <= self.block_size else idx[:, -self.block_size :])
            idx = torch.cat((idx, logits[:, -1, :].argmax(-1, keepdim=True)), dim=1)
        return idx


def _normal(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, mean=0.0, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def mingpt_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Decay for the weights of linear layers, none for biases, norms and embeddings: by module, as minGPT does it."""
    decay, no_decay = set(), set()
    for module_name, module in model.named_modules():
        for name, _ in module.named_parameters(recurse=False):
            full = f"{module_name}.{name}" if module_name else name
            (decay if name == "weight" and isinstance(module, nn.Linear) else no_decay).add(full)
    known = dict(model.named_parameters())
    assert not decay & no_decay
    assert not known.keys() - (decay | no_decay)
    return [
        {"params": [known[name] for name in sorted(decay)], "weight_decay": 0.1},
        {"params": [known[name] for name in sorted(no_decay)], "weight_decay": 0.0},
    ]


class LayerNorm(nn.Module):
    """LayerNorm with an optional bias."""

    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


class FlashSelfAttention(nn.Module):
    """Attention by torch's own function."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.c_attn = nn.Linear(width, 3 * width, bias=False)
        self.c_proj = nn.Linear(width, width, bias=False)
        self.resid_dropout, self.dropout = nn.Dropout(dropout), dropout
        self.n_head, self.n_embd = heads, width

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, width = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (each.view(batch, seq, self.n_head, width // self.n_head).transpose(1, 2) for each in (q, k, v))
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=None, dropout_p=self.dropout if self.training else 0, is_causal=True
        )
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).contiguous().view(batch, seq, width)))


class NanoMLP(nn.Module):
    """The feed-forward part."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.c_fc = nn.Linear(width, 4 * width, bias=False)
        self.gelu = nn.GELU()
        self.c_proj = nn.Linear(4 * width, width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.c_proj(self.gelu(self.c_fc(x))))


class NanoBlock(nn.Module):
    """A block of nanoGPT."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.ln_1, self.attn = LayerNorm(width, False), FlashSelfAttention(width, heads, dropout)
        self.ln_2, self.mlp = LayerNorm(width, False), NanoMLP(width, dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):
    """Embedding and head share one weight."""

    def __init__(self, vocab: int, width: int, heads: int, layers: int, block_size: int, dropout: float) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(vocab, width),
                "wpe": nn.Embedding(block_size, width),
                "drop": nn.Dropout(dropout),
                "h": nn.ModuleList([NanoBlock(width, heads, dropout) for _ in range(layers)]),
                "ln_f": LayerNorm(width, False),
            }
        )
        self.lm_head = nn.Linear(width, vocab, bias=False)
        self.transformer.wte.weight = self.lm_head.weight
        self.apply(_normal)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        pos = torch.arange(0, idx.size(1), dtype=torch.long, device=idx.device)
        x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(pos))
        for block in self.transformer.h:
            x = block(x)
        x = self.transformer.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None  # the last position alone
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


def nanogpt_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Decay for what has two dimensions or more."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return [
        {"params": [p for p in trained.values() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in trained.values() if p.dim() < 2], "weight_decay": 0.0},
    ]


def fused_adamw(groups: Any, **options: Any) -> torch.optim.AdamW:
    """AdamW, fused where torch has that."""
    fused = "fused" in inspect.signature(torch.optim.AdamW).parameters
    return torch.optim.AdamW(groups, **options, **({"fused": True} if fused else {}))


Hidden = tuple[Tensor, Tensor]


class RNNModel(nn.Module):
    """Encoder, LSTM, decoder. Batches are (seq, batch); the hidden state is the caller's."""

    def __init__(self, vocab: int, width: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.ntoken, self.nhid, self.nlayers = vocab, width, layers
        self.drop = nn.Dropout(dropout)
        self.encoder = nn.Embedding(vocab, width)
        self.rnn = nn.LSTM(width, width, layers, dropout=dropout)
        self.decoder = nn.Linear(width, vocab)
        self.init_weights()

    def init_weights(self) -> None:
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)
        nn.init.uniform_(self.decoder.weight, -0.1, 0.1)

    def forward(
        self, data: Tensor, targets: Tensor | None = None, hidden: Hidden | None = None
    ) -> tuple[Tensor, Hidden]:
        if hidden is None:
            hidden = self.init_hidden(data.size(1))
        output, hidden = self.rnn(self.drop(self.encoder(data)), hidden)
        decoded = self.decoder(self.drop(output)).view(-1, self.ntoken)
        return F.log_softmax(decoded, dim=1), hidden

    def init_hidden(self, batch: int) -> Hidden:
        weight = next(self.parameters())
        return (weight.new_zeros(self.nlayers, batch, self.nhid), weight.new_zeros(self.nlayers, batch, self.nhid))


def repackage_hidden(hidden: Any) -> Any:
    """The hidden state without its history."""
    if isinstance(hidden, Tensor):
        return hidden.detach()
    return tuple(repackage_hidden(each) for each in hidden)


class PackedTagger(nn.Module):
    """A bidirectional LSTM over packed sequences that tells the class of a sequence by its last states."""

    def __init__(self, vocab: int, width: int, classes: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, width, padding_idx=0)
        self.lstm = nn.LSTM(width, width, num_layers=2, bidirectional=True, batch_first=True, dropout=dropout)
        self.fc = nn.Linear(2 * width, classes)
        self.dropout = nn.Dropout(dropout)

    def forward(self, text: Tensor, lengths: Tensor, labels: Tensor | None = None) -> Tensor:
        embedded = self.dropout(self.embedding(text))
        packed = nn.utils.rnn.pack_padded_sequence(embedded, lengths.cpu(), batch_first=True, enforce_sorted=False)
        packed_output, (hidden, _) = self.lstm(packed)
        output, _ = nn.utils.rnn.pad_packed_sequence(packed_output, batch_first=True)
        last = torch.cat((hidden[-2], hidden[-1]), dim=1) + output.sum(1) / lengths[:, None]
        return self.fc(self.dropout(last))


class GraphConvolution(nn.Module):
    """A layer of Kipf and Welling's GCN, by a sparse matrix."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, out))
        self.bias = nn.Parameter(torch.empty(out))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = 1.0 / math.sqrt(self.weight.size(1))
        nn.init.uniform_(self.weight, -bound, bound)
        nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, x: Tensor, adj: Tensor) -> Tensor:
        return torch.spmm(adj, torch.mm(x, self.weight)) + self.bias


class GCN(nn.Module):
    """Two graph convolutions."""

    def __init__(self, features: int, width: int, classes: int, dropout: float) -> None:
        super().__init__()
        self.gc1, self.gc2 = GraphConvolution(features, width), GraphConvolution(width, classes)
        self.dropout = dropout

    def forward(self, x: Tensor, adj: Tensor, **rest: Tensor) -> Tensor:
        x = F.dropout(F.relu(self.gc1(x, adj)), self.dropout, training=self.training)
        return F.log_softmax(self.gc2(x, adj), dim=1)
