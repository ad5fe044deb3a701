"""Swapping modules loses nothing that hangs on them."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from atorch.errors import StrategyError
from atorch.model.module_swap import Choose, Swap, adopt_state, recast, swap_modules, why_unswappable


class Scaled(nn.Linear):
    """A replacement with parameters of its own."""


def scaled(module: nn.Linear, **kwargs: object) -> Scaled:
    made = Scaled(module.in_features, module.out_features, bias=module.bias is not None, **kwargs)  # type: ignore[arg-type]
    with torch.no_grad():
        for own, theirs in zip(made.parameters(), module.parameters(), strict=True):
            own.copy_(theirs)
    return made


def linears(name: str, module: nn.Module) -> nn.Module | None:
    return scaled(module) if type(module) is nn.Linear else None


def test_replaces_by_name_and_reports() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Sequential(nn.Linear(4, 2)))
    x = torch.randn(3, 4)
    before = model(x)
    assert swap_modules(model, linears) == [Swap(("0",), "Linear", "Scaled"), Swap(("2.0",), "Linear", "Scaled")]
    assert isinstance(model[0], Scaled)
    assert isinstance(model[2][0], Scaled)
    assert torch.equal(model(x), before)
    assert swap_modules(model, linears) == []
    with pytest.raises(StrategyError, match="the model itself, a Linear"):
        swap_modules(nn.Linear(2, 2), linears)


def asking(asked: list[str]) -> Choose:
    """`linears` that notes the names it is asked about."""

    def choose(name: str, module: nn.Module) -> nn.Module | None:
        asked.append(name)
        return linears(name, module)

    return choose


def test_a_parent_is_built_from_swapped_children() -> None:
    model = nn.ModuleDict({"block": nn.Sequential(nn.Linear(2, 2))})
    asked: list[str] = []
    swap_modules(model, lambda n, m: nn.ModuleList(m.children()) if n == "block" else asking(asked)(n, m))
    assert asked == ["block.0", ""], "children before parents"
    assert (type(model["block"]), type(model["block"][0])) == (nn.ModuleList, Scaled)


def test_a_module_in_two_places_is_swapped_once() -> None:
    shared, block, asked = nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3)), list[str]()
    model = nn.Sequential(shared, nn.Sequential(nn.Tanh(), shared), block, block)
    assert swap_modules(model, asking(asked)) == [
        Swap(("0", "1.1"), "Linear", "Scaled"),
        Swap(("2.0", "3.0"), "Linear", "Scaled"),
    ]
    assert model[0] is model[1][1]
    assert model[2] is model[3]
    assert asked == ["0", "1.0", "1", "2.0", "2", ""]


def test_tied_parameters_stay_tied() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(8, 4), "head": nn.Linear(4, 8, bias=False)})
    model["head"].weight = model["embed"].weight
    swap_modules(model, linears)
    assert model["head"].weight is model["embed"].weight
    assert len(list(model.parameters())) == 1
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    layers[1].weight = layers[2].weight = layers[0].weight
    swap_modules(layers, linears)
    assert layers[0].weight is layers[1].weight is layers[2].weight, "also to a module that was swapped before"


def test_a_tie_that_the_replacement_cannot_keep_is_refused_and_undone() -> None:
    model = nn.ModuleDict({"first": nn.Linear(4, 4), "embed": nn.Embedding(8, 4), "head": nn.Linear(4, 8)})
    model["head"].weight = model["embed"].weight
    first = model["first"]

    def choose(name: str, module: nn.Module) -> nn.Module | None:
        if name == "first":
            return scaled(module)  # type: ignore[arg-type]
        return nn.Linear(4, 16) if name == "head" else None

    with pytest.raises(StrategyError, match=r"head\.weight of shape \(8, 4\) is tied to Embedding\.weight"):
        swap_modules(model, choose)
    assert model["first"] is first
    assert model["head"].weight is model["embed"].weight


def test_flags_device_and_dtype_go_over() -> None:
    model = nn.Sequential(nn.Linear(4, 4, dtype=torch.bfloat16), nn.Linear(4, 4))
    model[0].weight.requires_grad_(False)
    model[0].eval()
    swap_modules(model, lambda name, m: Scaled(4, 4) if type(m) is nn.Linear else None)
    assert model[0].weight.dtype == torch.bfloat16
    assert not model[0].weight.requires_grad
    assert model[0].bias.requires_grad
    assert not model[0].training
    assert model[1].training
    assert model[1].weight.dtype == torch.float32
    model.to("meta")
    swap_modules(model, lambda name, m: Scaled(4, 4) if type(m) is Scaled else None)
    assert all(parameter.is_meta for parameter in model.parameters())


def test_hooks_go_over_and_their_handles_still_remove_them() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    calls: list[str] = []
    handles = [
        model[0].register_forward_pre_hook(lambda m, args: calls.append("pre")),
        model[0].register_forward_hook(lambda m, args, kwargs, out: calls.append("post"), with_kwargs=True),
        model[0].register_full_backward_hook(lambda m, gi, go: calls.append("backward")),
    ]
    swap_modules(model, linears)
    model(torch.randn(1, 2, requires_grad=True)).sum().backward()
    assert calls == ["pre", "post", "backward"]
    for handle in handles:
        handle.remove()
    model(torch.randn(1, 2))
    assert calls == ["pre", "post", "backward"]


def test_a_wrapper_does_not_run_the_hooks_twice_and_hooks_on_both_are_refused() -> None:
    model, calls = nn.Sequential(nn.Linear(2, 2)), list[int]()
    model[0].register_forward_hook(lambda m, args, out: calls.append(1))
    other = nn.Linear(2, 2)
    other.register_forward_hook(lambda m, args, out: None)
    with pytest.raises(StrategyError, match="both have forward_hooks"):
        swap_modules(model, lambda name, m: other if name == "0" else None)
    swap_modules(model, lambda name, m: nn.Sequential(m) if type(m) is nn.Linear else None)
    model(torch.randn(1, 2))
    assert calls == [1]


@pytest.mark.parametrize("why", ["forward was replaced", "parametrized", "load_state_dict hook"])
def test_what_would_be_lost_is_refused(why: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    if why == "forward was replaced":
        model[0].forward = lambda x: x
    elif why == "parametrized":
        parametrize.register_parametrization(model[0], "weight", nn.Identity())
    else:
        model[0].register_load_state_dict_pre_hook(lambda module, *args: None)
    old = model[0]
    assert why in (why_unswappable(old) or "")
    with pytest.raises(StrategyError, match=why):
        swap_modules(model, lambda name, m: nn.Linear(2, 2) if name == "0" else None)
    assert model[0] is old


def test_recast_shares_state_and_hooks_but_not_the_table_of_children() -> None:
    source = nn.Sequential(nn.Linear(2, 2))
    calls: list[int] = []
    handle = source.register_forward_hook(lambda m, args, out: calls.append(1))

    class Twice(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    twin = recast(source, Twice)
    x = torch.randn(1, 2)
    assert torch.equal(twin(x), 2 * source[0](x))
    assert calls == [1]
    handle.remove()
    twin.append(nn.ReLU())
    assert len(source) == 1


def test_adopt_state_takes_the_objects_of_the_same_name_and_shape() -> None:
    source, target = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    adopt_state(target, source)
    assert target.weight is source.weight
    assert target.running_mean is source.running_mean
    wider = nn.BatchNorm1d(5)
    adopt_state(wider, source)
    assert wider.weight is not source.weight
