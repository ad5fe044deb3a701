"""Chunks of a model as optimizers see them, without what moves them: gradients are placed by hand."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from atorch.runtime.chunk.layout import Item, pack
from atorch.runtime.chunk.memory import ChunkSet


def chunks_of(
    net: nn.Module, capacity: int = 100, but: Sequence[str] = (), group: object = None, **settings: object
) -> ChunkSet:
    """Chunks of all parameters but those named; `net` loses its values to them."""
    parameters = {name: parameter for name, parameter in net.named_parameters() if name not in but}
    items = [Item(name, p.numel(), str(p.dtype), p.requires_grad) for name, p in parameters.items()]
    layout = pack(items, capacity, 1 if group is None else group.size())
    return ChunkSet(layout, parameters, group=group, **settings)


def give_gradients(net: nn.Module, chunks: ChunkSet, gradients: dict[str, Tensor]) -> None:
    """What a backward pass does: managed parameters' gradients go to their chunks."""
    for name, parameter in net.named_parameters():
        if name not in gradients:
            continue
        place = chunks.place(parameter)
        if place is None:
            parameter.grad = gradients[name].clone()
        else:
            place[0].accumulate(place[1], gradients[name].to(place[0].dtype))


def values(net: nn.Module, chunks: ChunkSet, kind: str = "master") -> dict[str, Tensor]:
    """The parameters' values, as far as this process has them."""
    found = {}
    for name, parameter in net.named_parameters():
        place = chunks.place(parameter)
        found[name] = parameter.detach() if place is None else place[0].part(getattr(place[0], kind), place[1])
    return found


def random_gradients(net: nn.Module, seed: int, but: Sequence[str] = ()) -> dict[str, Tensor]:
    """As wild as real ones, but for the parameters named."""
    generator = torch.Generator().manual_seed(seed)

    def gradient(parameter: Tensor) -> Tensor:
        scale = 10 ** torch.empty(()).uniform_(-5, 2, generator=generator)
        drawn = torch.randn(parameter.shape, generator=generator) * scale
        return torch.empty_like(parameter.detach()).copy_(drawn)  # laid out as its parameter is: fused kernels need it

    made = {name: gradient(parameter) for name, parameter in net.named_parameters() if parameter.requires_grad}
    return {name: value for name, value in made.items() if name not in but}
