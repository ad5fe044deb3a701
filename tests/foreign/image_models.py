"""Models of images: a VAE, DCGAN, a UNet, ResNet, torchvision's ViT and a ConvNeXt as timm has it, written afresh.

auto_accelerate calls a model with whole batches, so those that take pictures alone take what they show, too.
"""

from collections import OrderedDict
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class VAE(nn.Module):
    """A variational autoencoder of flat images. The noise comes with the sample where it is given."""

    def __init__(self, pixels: int, width: int, latent: int) -> None:
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(pixels, width), nn.Linear(width, latent), nn.Linear(width, latent)
        self.fc3, self.fc4 = nn.Linear(latent, width), nn.Linear(width, pixels)
        self.pixels = pixels

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h1 = F.relu(self.fc1(x))
        return self.fc21(h1), self.fc22(h1)

    def reparameterize(self, mu: Tensor, logvar: Tensor, eps: Tensor | None) -> Tensor:
        std = torch.exp(0.5 * logvar)
        return mu + (torch.randn_like(std) if eps is None else eps) * std

    def decode(self, z: Tensor) -> Tensor:
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))

    def forward(self, x: Tensor, eps: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        mu, logvar = self.encode(x.view(-1, self.pixels))
        return self.decode(self.reparameterize(mu, logvar, eps)), mu, logvar


class Generator(nn.Module):
    """DCGAN's generator: 1 × 1 noise to 8 × 8 images."""

    def __init__(self, latent: int, width: int) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(latent, 2 * width, 4, 1, 0, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(True),
            nn.ConvTranspose2d(2 * width, width, 3, 1, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(True),
            nn.ConvTranspose2d(width, 1, 4, 2, 1, bias=False),
            nn.Tanh(),
        )

    def forward(self, noise: Tensor) -> Tensor:
        return self.main(noise)


class Discriminator(nn.Module):
    """DCGAN's discriminator of 8 × 8 images; it ends in a sigmoid."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(1, width, 4, 2, 1, bias=False),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(width, 2 * width, 3, 1, 1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(2 * width, 1, 4, 1, 0, bias=False),
            nn.Sigmoid(),
        )

    def forward(self, images: Tensor, label: Tensor | None = None) -> Tensor:
        return self.main(images).view(-1, 1).squeeze(1)


def dcgan_weights(module: nn.Module) -> None:
    """DCGAN's initialization, by the name of the class."""
    name = type(module).__name__
    if "Conv" in name:
        nn.init.normal_(module.weight, 0.0, 0.02)
    elif "BatchNorm" in name:
        nn.init.normal_(module.weight, 1.0, 0.02)
        nn.init.zeros_(module.bias)


class DoubleConv(nn.Module):
    """Two convolutions, the first with a group norm and the second with a batch norm."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.double_conv = nn.Sequential(
            nn.Conv2d(channels, out, kernel_size=3, padding=1, bias=False),
            nn.GroupNorm(2, out),
            nn.ReLU(inplace=True),
            nn.Conv2d(out, out, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(inplace=True),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.double_conv(x)


class Up(nn.Module):
    """Up, padded to the size of the skip, and put beside it."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(channels, channels // 2, kernel_size=2, stride=2)
        self.conv = DoubleConv(channels, out)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        x = self.up(x)
        rows, columns = skip.size(2) - x.size(2), skip.size(3) - x.size(3)
        x = F.pad(x, [columns // 2, columns - columns // 2, rows // 2, rows - rows // 2])
        return self.conv(torch.cat([skip, x], dim=1))


class UNet(nn.Module):
    """A UNet of two levels."""

    def __init__(self, channels: int, classes: int, width: int) -> None:
        super().__init__()
        self.inc = DoubleConv(channels, width)
        self.down1 = nn.Sequential(nn.MaxPool2d(2), DoubleConv(width, 2 * width))
        self.down2 = nn.Sequential(nn.MaxPool2d(2), DoubleConv(2 * width, 4 * width))
        self.up1, self.up2 = Up(4 * width, 2 * width), Up(2 * width, width)
        self.outc = nn.Conv2d(width, classes, kernel_size=1)

    def forward(self, image: Tensor, mask: Tensor | None = None) -> Tensor:
        x1 = self.inc(image)
        x2 = self.down1(x1)
        x3 = self.down2(x2)
        return self.outc(self.up2(self.up1(x3, x2), x1))


def dice_loss(probabilities: Tensor, target: Tensor, epsilon: float = 1e-6) -> Tensor:
    """1 minus the dice coefficient of each sample and class, their mean."""
    inter = 2 * (probabilities * target).sum((-1, -2))
    sets = probabilities.sum((-1, -2)) + target.sum((-1, -2))
    return 1 - ((inter + epsilon) / (sets + epsilon)).mean()


class BasicBlock(nn.Module):
    """ResNet's block of two convolutions."""

    def __init__(self, inplanes: int, planes: int, stride: int, downsample: nn.Module | None) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inplanes, planes, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    """A ResNet of two stages, built by `_make_layer` as torchvision's is."""

    def __init__(self, classes: int, width: int) -> None:
        super().__init__()
        self.inplanes = width
        self.conv1 = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.bn1, self.relu, self.maxpool = nn.BatchNorm2d(width), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        self.layer1, self.layer2 = self._make_layer(width, 2), self._make_layer(2 * width, 2, stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(2 * width, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, nn.BatchNorm2d):
                nn.init.ones_(module.weight)
                nn.init.zeros_(module.bias)

    def _make_layer(self, planes: int, blocks: int, stride: int = 1) -> nn.Sequential:
        downsample = None
        if stride != 1 or self.inplanes != planes:
            downsample = nn.Sequential(nn.Conv2d(self.inplanes, planes, 1, stride, bias=False), nn.BatchNorm2d(planes))
        layers = [BasicBlock(self.inplanes, planes, stride, downsample)]
        self.inplanes = planes
        layers += [BasicBlock(planes, planes, 1, None) for _ in range(1, blocks)]
        return nn.Sequential(*layers)

    def forward(self, x: Tensor, target: Tensor | None = None) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer2(self.layer1(x))
        return self.fc(torch.flatten(self.avgpool(x), 1))


class MLPBlock(nn.Sequential):
    """The feed-forward part of torchvision's ViT."""

    def __init__(self, width: int, inner: int, dropout: float) -> None:
        layers = [nn.Linear(width, inner), nn.GELU(), nn.Dropout(dropout), nn.Linear(inner, width), nn.Dropout(dropout)]
        super().__init__(*layers)


class EncoderBlock(nn.Module):
    """torchvision's encoder block, on torch's own MultiheadAttention."""

    def __init__(self, heads: int, width: int, dropout: float, norm_layer: Any) -> None:
        super().__init__()
        self.ln_1 = norm_layer(width)
        self.self_attention = nn.MultiheadAttention(width, heads, dropout=dropout, batch_first=True)
        self.dropout = nn.Dropout(dropout)
        self.ln_2 = norm_layer(width)
        self.mlp = MLPBlock(width, 2 * width, dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        torch._assert(tokens.dim() == 3, f"Expected (batch_size, seq_length, hidden_dim) got {tokens.shape}")
        x = self.ln_1(tokens)
        x, _ = self.self_attention(x, x, x, need_weights=False)
        x = self.dropout(x) + tokens
        return x + self.mlp(self.ln_2(x))


class Encoder(nn.Module):
    """Blocks in an OrderedDict, behind the embedding of positions."""

    def __init__(self, seq: int, layers: int, heads: int, width: int, dropout: float) -> None:
        super().__init__()
        norm_layer = partial(nn.LayerNorm, eps=1e-6)
        self.pos_embedding = nn.Parameter(torch.empty(1, seq, width).normal_(std=0.02))
        self.dropout = nn.Dropout(dropout)
        blocks = [(f"encoder_layer_{i}", EncoderBlock(heads, width, dropout, norm_layer)) for i in range(layers)]
        self.layers = nn.Sequential(OrderedDict(blocks))
        self.ln = norm_layer(width)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.ln(self.layers(self.dropout(tokens + self.pos_embedding)))


class VisionTransformer(nn.Module):
    """torchvision's ViT."""

    def __init__(
        self, size: int, patch: int, layers: int, heads: int, width: int, classes: int, dropout: float
    ) -> None:
        super().__init__()
        self.hidden_dim = width
        self.conv_proj = nn.Conv2d(3, width, patch, patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.encoder = Encoder((size // patch) ** 2 + 1, layers, heads, width, dropout)
        self.heads = nn.Sequential(OrderedDict([("head", nn.Linear(width, classes))]))

    def forward(self, images: Tensor, target: Tensor | None = None) -> Tensor:
        n = images.shape[0]
        x = self.conv_proj(images).reshape(n, self.hidden_dim, -1).permute(0, 2, 1)
        x = torch.cat([self.class_token.expand(n, -1, -1), x], dim=1)
        return self.heads(self.encoder(x)[:, 0])


def drop_path(x: Tensor, drop_prob: float, training: bool) -> Tensor:
    """Stochastic depth: whole samples of a residual branch are dropped."""
    if drop_prob == 0.0 or not training:
        return x
    keep = 1 - drop_prob
    random = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(keep)
    return x * random.div_(keep)


class DropPath(nn.Module):
    """`drop_path` as a module."""

    def __init__(self, drop_prob: float) -> None:
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, x: Tensor) -> Tensor:
        return drop_path(x, self.drop_prob, self.training)


class LayerNorm2d(nn.LayerNorm):
    """LayerNorm over the channels of images."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(0, 2, 3, 1)
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps).permute(0, 3, 1, 2)


class ConvNeXtBlock(nn.Module):
    """Depthwise convolution, norm, MLP, layer scale and drop path."""

    def __init__(self, width: int, path: float) -> None:
        super().__init__()
        self.conv_dw = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.mlp = nn.Sequential(
            OrderedDict(
                [("fc1", nn.Linear(width, 4 * width)), ("act", nn.GELU()), ("fc2", nn.Linear(4 * width, width))]
            )
        )
        self.gamma = nn.Parameter(0.1 * torch.ones(width))
        self.drop_path = DropPath(path) if path > 0.0 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x
        x = self.mlp(self.norm(self.conv_dw(x).permute(0, 2, 3, 1))).permute(0, 3, 1, 2)
        x = x.mul(self.gamma.reshape(1, -1, 1, 1))
        return self.drop_path(x) + shortcut


class ConvNeXtStage(nn.Module):
    """A stage: a downsampling of its own and blocks."""

    def __init__(self, channels: int, width: int, stride: int, depth: int, path: float) -> None:
        super().__init__()
        self.downsample = nn.Identity()
        if channels != width or stride > 1:
            self.downsample = nn.Sequential(LayerNorm2d(channels, eps=1e-6), nn.Conv2d(channels, width, stride, stride))
        self.blocks = nn.Sequential(*[ConvNeXtBlock(width, path) for _ in range(depth)])

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(self.downsample(x))


class ConvNeXt(nn.Module):
    """Stem, stages, head, with timm's names and its `forward_features` and `forward_head`."""

    def __init__(self, classes: int, width: int, path: float) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 2, 2), LayerNorm2d(width, eps=1e-6))
        self.stages = nn.Sequential(
            ConvNeXtStage(width, width, 1, 2, path), ConvNeXtStage(width, 2 * width, 2, 2, path)
        )
        self.head = nn.Sequential(
            OrderedDict([("norm", nn.LayerNorm(2 * width, eps=1e-6)), ("fc", nn.Linear(2 * width, classes))])
        )

    def forward_features(self, x: Tensor) -> Tensor:
        return self.stages(self.stem(x))

    def forward_head(self, x: Tensor) -> Tensor:
        return self.head(x.mean((-2, -1)))

    def forward(self, x: Tensor, target: Tensor | None = None) -> Tensor:
        return self.forward_head(self.forward_features(x))
