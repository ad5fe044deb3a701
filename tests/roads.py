"""Models that reach their own modules and tensors by other roads than attributes that torch knows."""

import functools
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.data import Dataset

from atorch import auto_accelerate
from tests.contract.job import distance, updates

WIDTH, BATCH, STEPS = 16, 8, 4


class Plain(nn.Module):
    """A residual block, of which only the road to its own modules differs below."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.ModuleDict({"fc": nn.Linear(WIDTH, 2 * WIDTH), "proj": nn.Linear(2 * WIDTH, WIDTH)})
        self.take_road()

    def take_road(self) -> None:
        """Keep what forward goes by."""

    def through(self, x: Tensor) -> Tensor:
        """The two layers."""
        return through(self.mlp, x)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.through(self.norm(x))


def through(mlp: Any, x: Tensor) -> Tensor:
    """The two layers of a block."""
    return mlp["proj"](F.gelu(mlp["fc"](x)))  # type: ignore[no-any-return]


class ByLambda(Plain):
    """As minGPT's Block."""

    def take_road(self) -> None:
        m = self.mlp
        self.through = lambda x: m["proj"](F.gelu(m["fc"](x)))  # type: ignore[method-assign]


class ByDefault(Plain):
    def take_road(self) -> None:
        self.through = lambda x, m=self.mlp: through(m, x)  # type: ignore[method-assign]


class ByBoundMethod(Plain):
    def take_road(self) -> None:
        self.calls = [self.norm.forward, self.mlp["fc"].forward, self.mlp["proj"].forward]

    def forward(self, x: Tensor) -> Tensor:
        norm, first, second = self.calls
        return x + second(F.gelu(first(norm(x))))  # type: ignore[no-any-return]


class ByPartial(Plain):
    def take_road(self) -> None:
        self.through = functools.partial(through, self.mlp)  # type: ignore[method-assign]


class ByContainers(Plain):
    def take_road(self) -> None:
        self.layers, self.named = [(self.mlp["fc"],)], {"norm": self.norm, "last": {self.mlp["proj"]}}

    def forward(self, x: Tensor) -> Tensor:
        (last,) = self.named["last"]
        return x + last(F.gelu(self.layers[0][0](self.named["norm"](x))))  # type: ignore[no-any-return, operator]


class ByHook(Plain):
    """The second layer is called by a hook of the first, which is a closure, and the norm by a bound method."""

    def take_road(self) -> None:
        second = self.mlp["proj"]
        self.mlp["fc"].register_forward_hook(lambda module, args, output: second(F.gelu(output)))
        self.mlp["fc"].register_forward_pre_hook(self.normed)

    def normed(self, module: nn.Module, args: Any) -> Any:
        return (self.norm(*args),)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp["fc"](x)  # type: ignore[no-any-return]


class ByOwnForward(Plain):
    """A forward on the instance, around the one that was there, as accelerate's hooks put one."""

    def take_road(self) -> None:
        for layer in self.mlp.values():
            old = layer.forward

            def patched(module: nn.Module, *args: Any, old: Callable[..., Any] = old) -> Any:
                return old(*args)

            layer.forward = functools.update_wrapper(functools.partial(patched, layer), old)
        self.norm.forward = types.MethodType(
            lambda norm, x: F.layer_norm(x, (WIDTH,), norm.weight, norm.bias), self.norm
        )


class ByParameter(Plain):
    """A closure over parameters, which are a linear layer's elsewhere."""

    def take_road(self) -> None:
        first, second = self.mlp["fc"], self.mlp["proj"]
        pairs = [(first.weight, first.bias), (second.weight, second.bias)]
        self.through = lambda x: F.linear(F.gelu(F.linear(x, *pairs[0])), *pairs[1])  # type: ignore[method-assign]


class ByDecorator(Plain):
    def take_road(self) -> None:
        inner = ByLambda.take_road

        @functools.wraps(inner)
        def noted(x: Tensor) -> Tensor:
            return through(noted.mlp, x)  # type: ignore[attr-defined, no-any-return]

        noted.mlp = self.mlp  # type: ignore[attr-defined]
        self.through = noted  # type: ignore[method-assign]


class ByWeakReference(Plain):
    def take_road(self) -> None:
        self.own = weakref.ref(self.mlp)
        self.__dict__["proxy"] = weakref.proxy(self.norm)  # torch would take it for a child, and fail in eval()

    def forward(self, x: Tensor) -> Tensor:
        return x + through(self.own(), self.proxy(x))


class ByCache(Plain):
    def take_road(self) -> None:
        mlp = self.mlp
        self.layer = functools.lru_cache(maxsize=None)(lambda name: mlp[name])
        self.layer("fc")

    def through(self, x: Tensor) -> Tensor:
        return self.layer("proj")(F.gelu(self.layer("fc")(x)))  # type: ignore[no-any-return]


class Holder:
    """An ordinary object that holds modules."""

    def __init__(self, mlp: nn.ModuleDict) -> None:
        self.mlp = mlp

    def __call__(self, x: Tensor) -> Tensor:
        return through(self.mlp, x)


class ByObject(Plain):
    def take_road(self) -> None:
        holder = Holder(self.mlp)
        self.through = lambda x: holder(x)  # type: ignore[method-assign]


class ByParametrization(Plain):
    def take_road(self) -> None:
        parametrizations.weight_norm(self.mlp["fc"])
        ByLambda.take_road(self)  # type: ignore[arg-type]


class ByConstant(Plain):
    """A tensor that only a closure has."""

    def take_road(self) -> None:
        scale, mlp = torch.full((WIDTH,), 0.5), self.mlp
        self.through = lambda x: through(mlp, x * scale)  # type: ignore[method-assign]


class WithLock(Plain):
    """A closure that has, beside the modules, what cannot be copied."""

    def take_road(self) -> None:
        lines, mlp = (line for line in ()), self.mlp
        self.through = lambda x: through(mlp, x) if lines is not None else x  # type: ignore[method-assign]


ROADS: Mapping[str, type[Plain]] = {
    cls.__name__: cls
    for cls in (
        *(ByLambda, ByDefault, ByBoundMethod, ByPartial, ByContainers, ByHook, ByOwnForward, ByParameter, ByDecorator),
        *(ByWeakReference, ByCache, ByObject, ByParametrization, ByConstant, WithLock),
    )
}


class Net(nn.Module):
    """Blocks of one road, of which the last is used twice and the head is tied to the embedding by a closure."""

    def __init__(self, road: str) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks = nn.ModuleList(ROADS[road]() for _ in range(3))
        embed, last = self.embed, self.blocks[2]
        self.head = lambda x: F.linear(last(x), embed.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def net(road: str) -> Net:
    """Always the same weights."""
    torch.manual_seed(0)
    return Net(road)


class Pairs(Dataset[Tensor]):
    def __len__(self) -> int:
        return STEPS * BATCH

    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))


def loss_func(batch: Tensor, output: Tensor) -> Tensor:
    return F.mse_loss(output, batch.flip(-1))


def sgd(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def job() -> dict[str, Any]:
    """The arguments of auto_accelerate beside the model."""
    return {"optim_func": sgd, "dataset": Pairs(), "loss_func": loss_func, "dataloader_args": {"batch_size": BATCH}}


def trained_plainly(model: nn.Module) -> dict[str, Tensor]:
    """The state after one epoch in torch alone."""
    optim = sgd(model.parameters())
    for step in range(STEPS):
        batch = torch.stack([Pairs()[step * BATCH + row] for row in range(BATCH)])
        loss_func(batch, model(batch)).backward()
        optim.step()
        optim.zero_grad()
    return model.state_dict()


def trained(strategy: Any, road: str) -> dict[str, Tensor]:
    """The same by the documented loop under a strategy, or under what is found where it is None."""
    _, result, _ = auto_accelerate(net(road), load_strategy=strategy, **job())
    for batch in result.dataloader:
        batch = result.prepare_input(batch, "cpu")
        result.loss_func(batch, result.model(batch)).backward()
        result.optim.step()
        result.optim.zero_grad()
    state: dict[str, Tensor] = result.model.state_dict()
    return {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in state.items()}


def deviation(rank: int, size: int, strategy: Any, road: str) -> float:
    """‖Δp − Δp_ref‖ / ‖Δp_ref‖ after the epoch."""
    before, expected = net(road).state_dict(), trained_plainly(net(road))
    found = trained(strategy, road)
    return distance(updates(before, found), updates(before, expected))
