"""LAMB and NovoGrad against their formulas, one number after another; on one process, over several, by a kernel."""

import copy
import logging
import math
import sys
import types
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from atorch import logs
from atorch.errors import ArgumentError
from atorch.runtime.gradients.clip import Spread
from atorch.smp.inner_optimizer import Fused, TensorBucket
from atorch.smp.optimizers import FusedLamb, FusedNovoGrad
from tests.pool import Pool
from tests.smp.job import several

STEPS = 5
SHAPES = ((4, 3), (5,), (2, 2, 2), ())


class Reference:
    """The papers' algorithms as loops over parameters, in fp64, with what apex's kernels make of open choices."""

    def __init__(self, parameters: list[Tensor], groups: list[dict[str, Any]]) -> None:
        self.parameters = [each.detach().double().clone() for each in parameters]
        self.m = [torch.zeros_like(each) for each in self.parameters]
        self.v: list[Any] = [None for _ in parameters]
        self.groups = groups  # one a parameter
        self.steps = [0] * len(parameters)

    def lamb(self, gradients: list[Tensor | None], max_grad_norm: float, adam_w: bool, nvlamb: bool) -> None:
        norm = math.sqrt(sum(float((each.double() ** 2).sum()) for each in gradients if each is not None))
        for i, given in enumerate(gradients):
            self.steps[i] += 1
            if given is None:
                continue
            o, p, t = self.groups[i], self.parameters[i], self.steps[i]
            b1, b2 = o["betas"]
            g = given.double() / max(1.0, norm / max_grad_norm)
            if not adam_w:
                g = g + o["weight_decay"] * p
            self.m[i] = b1 * self.m[i] + (1 - b1 if o["grad_averaging"] else 1) * g
            self.v[i] = b2 * (0 if self.v[i] is None else self.v[i]) + (1 - b2) * g * g
            c1, c2 = (1 - b1**t, 1 - b2**t) if o["bias_correction"] else (1, 1)
            u = (self.m[i] / c1) / ((self.v[i] / c2).sqrt() + o["eps"])
            if adam_w:
                u = u + o["weight_decay"] * p
            ratio = 1.0
            if nvlamb or o["weight_decay"]:
                size, change = p.norm().item(), u.norm().item()
                ratio = size / change if size and change else 1.0
            self.parameters[i] = p - o["lr"] * ratio * u

    def novograd(self, gradients: list[Tensor | None], inside: bool) -> None:
        for i, given in enumerate(gradients):
            self.steps[i] += 1
            if given is None:
                continue
            o, p, t, g = self.groups[i], self.parameters[i], self.steps[i], given.double()
            b1, b2 = o["betas"]
            n = g.abs().max().item() if o["norm_type"] == 0 else g.norm().item()
            before = (0.0 if o["init_zero"] else n) if self.v[i] is None else self.v[i]
            if o["norm_type"] == 0:
                self.v[i] = b2 * before + (1 - b2) * n
            else:
                self.v[i] = math.sqrt(b2 * before**2 + (1 - b2) * n**2)
            c1, c2 = (1 - b1**t, math.sqrt(1 - b2**t)) if o["bias_correction"] else (1, 1)
            divisor = self.v[i] / c2 + o["eps"]
            taken = g / divisor + o["weight_decay"] * p if inside else g
            self.m[i] = b1 * self.m[i] + (1 - b1 if o["grad_averaging"] else 1) * taken
            u = self.m[i] / c1 if inside else self.m[i] / c1 / divisor + o["weight_decay"] * p
            self.parameters[i] = p - o["lr"] * u


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    torch.manual_seed(3)
    return [nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]


def gradients(step: int, dtype: torch.dtype = torch.float32) -> list[Tensor | None]:
    """Of all parameters, but for the second one's in the first two steps, in which it waits."""
    torch.manual_seed(100 + step)
    return [None if place == 1 and step < 2 else torch.randn(shape).to(dtype) for place, shape in enumerate(SHAPES)]


def train(optimizer: Fused, held: list[nn.Parameter], steps: range = range(STEPS)) -> None:
    for step in steps:
        for each, gradient in zip(held, gradients(step, held[0].dtype), strict=True):
            each.grad = gradient
        optimizer.step()


def expected(kind: type[Fused], optimizer: Fused, begin: list[nn.Parameter], **modes: Any) -> Reference:
    of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    reference = Reference(begin, [of[id(each)] for each in begin])
    for step in range(STEPS):
        given = gradients(step, begin[0].dtype)
        if kind is FusedLamb:
            reference.lamb(
                given, modes.get("max_grad_norm", 1.0), modes.get("adam_w_mode", True), modes.get("use_nvlamb", False)
            )
        else:
            reference.novograd(given, modes.get("reg_inside_moment", False))
    return reference


def distance(got: list[nn.Parameter], want: list[Tensor], begin: list[Tensor]) -> float:
    off = sum(float(((g.detach().double() - w) ** 2).sum()) for g, w in zip(got, want, strict=True))
    moved = sum(float(((w - b.double()) ** 2).sum()) for w, b in zip(want, begin, strict=True))
    assert moved > 0
    return math.sqrt(off / moved)


LAMB: list[dict[str, Any]] = [
    {}, {"max_grad_norm": 0.3}, {"max_grad_norm": math.inf, "lr": 0.1}, {"adam_w_mode": False, "weight_decay": 0.1},
    {"weight_decay": 0.0}, {"weight_decay": 0.0, "use_nvlamb": True}, {"bias_correction": False, "betas": (0.7, 0.9)},
    {"grad_averaging": False, "eps": 1e-2},
]  # fmt: skip
NOVOGRAD: list[dict[str, Any]] = [
    {}, {"weight_decay": 0.1}, {"weight_decay": 0.1, "reg_inside_moment": True},
    {"init_zero": True, "betas": (0.95, 0.98)}, {"norm_type": 0},
    {"norm_type": 0, "init_zero": True, "grad_averaging": False}, {"bias_correction": False, "lr": 0.1, "eps": 1e-2},
]  # fmt: skip
# NovoGrad starts from a norm that bias correction makes larger: its first updates are small beside the parameters.
LARGE = {FusedLamb: 0.05, FusedNovoGrad: 1.0}
CASES = [(FusedLamb, each) for each in LAMB] + [(FusedNovoGrad, each) for each in NOVOGRAD]
every_case = pytest.mark.parametrize(
    ("kind", "options"), CASES, ids=[f"{kind.__name__}-{'-'.join(options) or 'defaults'}" for kind, options in CASES]
)
both = pytest.mark.parametrize("kind", [FusedLamb, FusedNovoGrad])


@every_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_a_step_is_that_of_the_formulas(kind: type[Fused], options: dict[str, Any], dtype: torch.dtype) -> None:
    options = {"lr": LARGE[kind], **options}
    held = parameters(dtype)
    begin = [each.detach().clone() for each in held]
    optimizer = kind(held, **options)
    reference = expected(kind, optimizer, held, **options)
    train(optimizer, held)
    band = {torch.float64: 1e-6, torch.float32: 1e-5, torch.float16: 0.05, torch.bfloat16: 0.2}[dtype]
    assert distance(held, reference.parameters, begin) <= band


@both
def test_the_defaults_are_apexs(kind: type[Fused]) -> None:
    defaults = {"lr": 1e-3, "bias_correction": True, "betas": (0.9, 0.999), "grad_averaging": True}
    if kind is FusedLamb:
        defaults |= {"eps": 1e-6, "weight_decay": 0.01, "max_grad_norm": 1.0}
    else:
        defaults |= {"eps": 1e-8, "weight_decay": 0.0, "norm_type": 2, "init_zero": False}
    assert kind(parameters()).defaults == defaults


@both
def test_groups_have_their_own_settings_and_steps(kind: type[Fused]) -> None:
    held = parameters()
    begin = [each.detach().clone() for each in held]
    optimizer = kind([{"params": held[:2], "lr": 0.1}, {"params": held[2:], "weight_decay": 0.3}], lr=0.01)
    reference = expected(kind, optimizer, held)
    train(optimizer, held)
    assert distance(held, reference.parameters, begin) <= 1e-5

    late = nn.Parameter(torch.ones(3))
    optimizer.add_param_group({"params": [late], "lr": 0.5})
    late.grad = torch.tensor([1.0, 2.0, 3.0])
    optimizer.step()
    assert [group["step"] for group in optimizer.param_groups] == [STEPS + 1, STEPS + 1, 1]
    alone = nn.Parameter(torch.ones(3))
    alone.grad = torch.tensor([1.0, 2.0, 3.0])
    if kind is FusedNovoGrad:  # LAMB's norm is of all groups together
        kind([alone], lr=0.5).step()
        assert torch.equal(late, alone)


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_loaded_state_goes_on(kind: type[Fused], dtype: torch.dtype) -> None:
    whole = parameters(dtype)
    train(kind(whole, lr=0.05), whole)

    first = parameters(dtype)
    optimizer = kind(first, lr=0.05)
    train(optimizer, first, range(2))
    state = copy.deepcopy(optimizer.state_dict())
    second = [nn.Parameter(each.detach().clone()) for each in first]
    other = kind(second, lr=0.9)
    other.load_state_dict(state)
    train(other, second, range(2, STEPS))
    assert all(torch.equal(a, b) for a, b in zip(whole, second, strict=True))


def test_a_state_dict_of_apexs_novograd_loads() -> None:
    """It has norms by group: those of fp16 parameters, and those of fp32 ones."""
    held = [*parameters()[:2], nn.Parameter(torch.randn(3).half())]
    optimizer = FusedNovoGrad(held, lr=0.05)
    for each in held:
        each.grad = torch.randn_like(each)
    optimizer.step()
    state = optimizer.state_dict()
    norms = [state["state"][number].pop("exp_avg_sq") for number in range(3)]
    state["param_groups"][0]["exp_avg_sq"] = [torch.stack(norms[2:]), torch.stack(norms[:2])]
    other = FusedNovoGrad(held)
    other.load_state_dict(state)
    assert [float(other.state[each]["exp_avg_sq"]) for each in held] == [float(norm) for norm in norms]
    assert "exp_avg_sq" not in other.param_groups[0]


@both
def test_closures_schedules_copies_and_zeroed_gradients_are_as_with_torchs(kind: type[Fused]) -> None:
    held = parameters()
    optimizer = kind(held)

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = sum((each**2).sum() for each in held)
        value.backward()
        return value

    before = loss().item()
    assert optimizer.step(loss).item() == before
    assert loss().item() < before

    for held, keeps in ((parameters(), False), (parameters(), True)):
        optimizer = kind(held, set_grad_none=not keeps)
        train(optimizer, held, range(2, 3))
        optimizer.zero_grad()
        assert all((each.grad is not None) == keeps for each in held)
        optimizer.zero_grad(set_to_none=True)
        assert all(each.grad is None for each in held)

    modes = {"adam_w_mode": False, "use_nvlamb": True} if kind is FusedLamb else {"reg_inside_moment": True}
    optimizer = copy.deepcopy(kind(parameters(), set_grad_none=False, **modes))
    assert {name: getattr(optimizer, name) for name in modes} == modes
    assert optimizer.set_grad_none is False

    held = parameters()
    optimizer = kind(held, lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0 if step else 1.0)
    optimizer.step()
    schedule.step()
    begin = [each.detach().clone() for each in held]
    train(optimizer, held, range(1))
    assert all(torch.equal(a, b) for a, b in zip(held, begin, strict=True))


@both
def test_bad_groups_and_sparse_and_complex_parameters_are_named(kind: type[Fused]) -> None:
    optimizer = kind(parameters())
    with pytest.raises(ArgumentError, match="lr"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], "lr": -1})
    assert len(optimizer.param_groups) == 1
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ArgumentError, match="sparse"):
        kind(table.parameters()).step()
    number = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    number.grad = torch.ones_like(number)
    with pytest.raises(ArgumentError, match="complex64"):
        kind([number]).step()


def test_a_parameter_of_zeros_steps_as_adams() -> None:
    """There is no norm that its update could be as large as."""
    held, start = nn.Parameter(torch.zeros(3)), torch.zeros(3)
    held.grad = torch.tensor([0.1, -0.2, 0.3])
    optimizer = FusedLamb([held], lr=0.5)
    reference = Reference([start], optimizer.param_groups)
    reference.lamb([held.grad], 1.0, True, False)
    optimizer.step()
    assert distance([held], reference.parameters, [start]) <= 1e-5


def stepped_in_parts(rank: int, size: int, kind: type[Fused], options: dict[str, Any], how: str) -> float:
    """The distance of what processes with a part of the model each get from the whole model's."""
    held = parameters()
    begin = [each.detach().clone() for each in held]
    optimizer = kind(held, **options)
    reference = expected(kind, optimizer, held, **options)
    group = dist.group.WORLD
    assert group is not None
    if how == "stages":
        # The last parameter is tied: both stages have it, and the first counts it.
        mine = {0: [0, 1, 3], 1: [2, 3]}[rank]
        optimizer = kind([held[place] for place in mine], **options)
        elsewhere = [held[3]] if rank == 1 else []
        optimizer.spread = Spread(over=(group,), counted_elsewhere=elsewhere)
        whose = [(place, held[place], lambda whole: whole) for place in mine]
    elif how == "rows":
        part = nn.Parameter(held[0].detach().chunk(size)[rank].clone())
        optimizer = kind([part, *held[1:]], **options)
        optimizer.spread = Spread(parts={part: (group,)})
        whose = [(0, part, lambda whole: whole.chunk(size)[rank])]
        whose += [(place, held[place], lambda whole: whole) for place in (1, 2, 3)]
    else:
        mesh = init_device_mesh("cpu", (size,))
        sharded = nn.Parameter(distribute_tensor(held[1].detach(), mesh, [Shard(0)]))
        optimizer = kind([held[0], sharded, *held[2:]], **options)
        whose = [(place, held[place], lambda whole: whole) for place in (0, 2, 3)]
        whose.append((1, sharded, lambda whole: distribute_tensor(whole, mesh, [Shard(0)])))
    for step in range(STEPS):
        given = gradients(step)
        for place, parameter, part_of in whose:
            parameter.grad = None if given[place] is None else part_of(given[place])
        optimizer.step()
    got = [each.full_tensor() if isinstance(each, DTensor) else each for _, each, _ in whose]

    def plain(place: int, part_of: Any, of: list[Tensor]) -> Tensor:
        return of[place] if how == "dtensor" else part_of(of[place])

    want = [plain(place, part_of, reference.parameters) for place, _, part_of in whose]
    before = [plain(place, part_of, begin) for place, _, part_of in whose]
    return distance([each.detach() for each in got], want, before)


def test_norms_are_of_the_whole_model(pool: Pool) -> None:
    kinds: list[tuple[type[Fused], dict[str, Any]]] = [
        (FusedLamb, {"lr": 0.05, "max_grad_norm": 0.5}),
        (FusedNovoGrad, {"lr": 1.0}),
        (FusedNovoGrad, {"lr": 1.0, "norm_type": 0}),
    ]
    ways = [(stepped_in_parts, *kind, how) for kind in kinds for how in ("stages", "rows", "dtensor")]
    assert max(map(max, pool.run(several, ways))) <= 1e-5


class Kernel:
    """What apex's extension is given, run by this optimizer's own operations: order and meaning of arguments."""

    def __init__(self, kind: type[Fused]) -> None:
        self.kind, self.calls = kind, 0

    def __call__(self, chunk: int, noop: Tensor, lists: list[list[Tensor]], *args: Any) -> None:
        self.calls += 1
        assert noop.dtype == torch.int32
        names = ["beta1", "beta2", "eps", "step", "bias_correction", "weight_decay", "grad_averaging"]
        if self.kind is FusedLamb:
            names = ["lr", *names, "mode", "norm", "max_grad_norm", "use_nvlamb"]
            grads, params, means, squares = lists
        else:
            names = ["norms", "lr", *names, "mode", "norm_type"]
            grads, params, means = lists
            squares = []
        given = dict(zip(names, args, strict=True))
        group = {**given, "betas": (given["beta1"], given["beta2"])}
        reference = Reference(params, [group] * len(params))
        reference.m, reference.steps = [each.double() for each in means], [given["step"] - 1] * len(params)
        if self.kind is FusedLamb:
            reference.v = [each.double() for each in squares]
            whole = math.sqrt(sum(float((each.double() ** 2).sum()) for each in grads))
            assert float(given["norm"]) == pytest.approx(whole, rel=1e-5)
            reference.lamb(grads, given["max_grad_norm"], given["mode"] == 1, given["use_nvlamb"])
            for mine, result in zip(squares, reference.v, strict=True):
                mine.copy_(result)
        else:
            group["init_zero"] = False
            reference.v = given["norms"].tolist()
            reference.novograd(grads, given["mode"] == 0)
            given["norms"].copy_(torch.tensor(reference.v))
        for mine, result in zip((*params, *means), (*reference.parameters, *reference.m), strict=True):
            mine.copy_(result)


@pytest.fixture
def apex(monkeypatch: pytest.MonkeyPatch) -> dict[type[Fused], Kernel]:
    """apex as if it were here, and this device CUDA."""
    kernels = {kind: Kernel(kind) for kind in (FusedLamb, FusedNovoGrad)}
    extension, applier = types.ModuleType("amp_C"), types.ModuleType("apex.multi_tensor_apply")
    vars(extension).update(multi_tensor_lamb=kernels[FusedLamb], multi_tensor_novograd=kernels[FusedNovoGrad])
    vars(applier)["multi_tensor_applier"] = lambda op, noop, lists, *args: op(2048 * 32, noop, lists, *args)
    for name, module in (
        ("amp_C", extension),
        ("apex", types.ModuleType("apex")),
        ("apex.multi_tensor_apply", applier),
    ):
        monkeypatch.setitem(sys.modules, name, module)

    monkeypatch.setattr(TensorBucket, "kind", property(lambda bucket: ("cuda", bucket.parameters[0].dtype)))
    return kernels


@every_case
def test_apexs_kernel_is_given_what_it_takes(
    kind: type[Fused], options: dict[str, Any], apex: dict[type[Fused], Kernel]
) -> None:
    held = parameters()
    begin = [each.detach().clone() for each in held]
    optimizer = kind(held, **{"lr": LARGE[kind], **options})
    reference = expected(kind, optimizer, held, **options)
    train(optimizer, held)
    assert apex[kind].calls == STEPS
    assert distance(held, reference.parameters, begin) <= 1e-5
    train(kind(halves := parameters(torch.bfloat16)), halves)
    assert apex[kind].calls == STEPS, "it takes no bf16"


def test_what_steps_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    logs.log_once.cache_clear()
    with caplog.at_level(logging.INFO, "atorch"):
        for _ in range(2):
            held = parameters()
            train(FusedLamb(held), held)
    assert [message for message in caplog.messages if "FusedLamb" in message] == [
        "smp.optimizers.FusedLamb steps by torch's operations on cpu; apex's kernel is for CUDA"
    ]
