"""fp8: which layers are converted, that training follows bf16, and what transformer-engine is told."""

import copy
import importlib.machinery
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from atorch.errors import CapabilityError, StrategyError
from atorch.runtime.precision.fp8 import convert_linears, without_fp8
from atorch.runtime.precision.fp8_recipe import Fp8Recipe, choose_backend

CUDA = torch.device("cuda")


def small() -> nn.ModuleDict:
    layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32)) for _ in range(2))
    return nn.ModuleDict({"layers": layers, "odd": nn.Linear(32, 20), "lm_head": nn.Linear(32, 48)})


INNER = ("layers.0.0", "layers.0.2", "layers.1.0", "layers.1.2")


@pytest.mark.usefixtures("_torchao")
class TestTorchao:
    def test_converts_what_fits_and_names_the_rest(self) -> None:
        model = small()
        parameters = dict(model.named_parameters())
        report = convert_linears(model, exclude=("lm_head",), emulate=True)
        assert (report.backend, report.emulated) == ("torchao", True)
        assert report.converted == INNER
        assert {kept.name: kept.reason for kept in report.left} == {
            "odd": "its weight is 20 × 32; both must be multiples of 16",
            "lm_head": "exclude names it ('lm_head')",
        }
        assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
        assert type(model["layers"][0][0]).__name__ == "Float8Linear"
        assert type(model["lm_head"]) is nn.Linear

    def test_include_takes_substrings_and_tells_which_matches_nothing(self, caplog: pytest.LogCaptureFixture) -> None:
        report = convert_linears(small(), include=["layers.1", "head", "layrs"], emulate=True)
        assert report.converted == ("layers.1.0", "layers.1.2", "lm_head")
        assert "fp8 include has 'layrs', but no nn.Linear" in caplog.text

    def test_quantizes_and_gives_gradients(self) -> None:
        plain = nn.Sequential(nn.Linear(32, 32))
        model = copy.deepcopy(plain)
        convert_linears(model, emulate=True)
        x = torch.randn(16, 32)
        with without_fp8(model):
            assert torch.equal(model(x), plain(x)), "exact on request"
        wanted, found = plain(x), model(x)
        error = ((found - wanted).norm() / wanted.norm()).item()
        assert 1e-3 < error < 0.1  # e4m3 has 3 bits of mantissa: something was rounded, and by no more than that
        wanted.square().sum().backward()
        found.square().sum().backward()
        grads = model[0].weight.grad, plain[0].weight.grad
        assert (grads[0] - grads[1]).norm() < 0.15 * grads[1].norm()

    def test_the_real_matmul_agrees_with_emulation_and_formats_differ_in_the_gradient_alone(self) -> None:
        hybrid = nn.Sequential(nn.Linear(32, 32))
        e4m3, real = copy.deepcopy(hybrid), copy.deepcopy(hybrid)
        assert not convert_linears(real, emulate=False).emulated
        convert_linears(hybrid, emulate=True)
        convert_linears(e4m3, emulate=True, recipe=Fp8Recipe(fp8_format="E4M3"))
        x = torch.randn(16, 32)
        outputs = hybrid(x), e4m3(x)
        assert torch.allclose(real(x), outputs[0], rtol=1e-3, atol=1e-3)
        assert torch.equal(*outputs)
        for output in outputs:
            output.sin().sum().backward()
        assert not torch.equal(hybrid[0].weight.grad, e4m3[0].weight.grad)

    def test_scales_of_rows_keep_small_rows_beside_large_ones(self) -> None:
        plain = nn.Sequential(nn.Linear(32, 32, bias=False))
        x = torch.randn(16, 32) * torch.logspace(0, 9, 16).unsqueeze(1)  # of one scale, e4m3 has 5 orders of magnitude
        errors = {}
        for scaling in ("tensorwise", "rowwise", "rowwise_gw_hp"):
            model = copy.deepcopy(plain)
            convert_linears(model, emulate=True, recipe=Fp8Recipe(scaling=scaling))
            errors[scaling] = ((model(x) - plain(x)).norm(dim=1) / plain(x).norm(dim=1)).max().item()
        assert errors["rowwise"] < 0.1
        assert errors["rowwise_gw_hp"] < 0.1
        assert errors["tensorwise"] > 0.9

    def test_gradients_of_weights_keep_the_old_dtype_on_request(self) -> None:
        plain = nn.Sequential(nn.Linear(32, 32, bias=False))
        model = copy.deepcopy(plain)
        convert_linears(model, emulate=True, recipe=Fp8Recipe(scaling="rowwise_gw_hp"))
        x, gradient = torch.randn(16, 32, requires_grad=True), torch.randn(16, 32)
        for layers in (plain, model):
            layers(x).backward(gradient)
        assert torch.allclose(model[0].weight.grad, plain[0].weight.grad, rtol=1e-5, atol=1e-5)

    def test_layers_inside_peft_adapters_stay(self) -> None:
        peft = pytest.importorskip("peft")

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.adapted, self.plain = nn.Linear(32, 32), nn.Linear(32, 32)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.plain(self.adapted(x))  # type: ignore[no-any-return]

        model = peft.get_peft_model(Model(), peft.LoraConfig(target_modules=["adapted"], r=16))
        report = convert_linears(model, emulate=True)
        assert report.converted == ("base_model.model.plain",)
        assert {kept.reason for kept in report.left} == {"it is inside a peft adapter, with which fp8 is not supported"}

    def test_torchs_own_projections_stay(self) -> None:
        # MultiheadAttention reads its out_proj's weight and never calls it.
        model = nn.ModuleDict({"attention": nn.MultiheadAttention(32, 2), "out": nn.Linear(32, 32)})
        assert convert_linears(model, emulate=True).converted == ("out",)


@pytest.fixture
def _torchao() -> None:
    pytest.importorskip("torchao")


class TestArguments:
    @pytest.mark.parametrize(
        ("knobs", "told"),
        [
            ({"include": ("lm_haed",)}, "fp8 include has 'lm_haed', but no nn.Linear .*did you mean 'lm_head'"),
            ({"exclude": ("lm_haed",)}, "fp8 exclude has 'lm_haed', but no nn.Linear .*did you mean 'lm_head'"),
            ({"exclude": "lm_head"}, r"give a list of them: \['lm_head'\]"),
        ],
    )
    def test_layers_that_there_are_not_are_refused(self, knobs: dict[str, Any], told: str) -> None:
        with pytest.raises(StrategyError, match=told):
            convert_linears(small(), emulate=True, **knobs)

    @pytest.mark.parametrize(
        ("backend", "recipe", "emulate", "device", "told"),
        [
            ("torchao", {"margin": 1, "amax_history_len": 16}, None, "cuda",
             "margin, amax_history_len, but torchao scales by the tensor at hand"),
            ("te", {"scaling": "rowwise"}, None, "cuda", "'rowwise' with backend \"te\", which scales by past steps"),
            ("te", {}, True, "cuda", "only torchao emulates"),
            ("te", {}, None, "cpu", "runs on CUDA; this is cpu"),
        ],
    )  # fmt: skip
    def test_what_a_backend_does_not_do_is_refused(
        self, backend: str, recipe: dict[str, Any], emulate: bool | None, device: str, told: str
    ) -> None:
        with pytest.raises(StrategyError, match=told):
            choose_backend(backend, Fp8Recipe(**recipe), emulate, device)

    def test_a_missing_package_is_named_with_its_extra(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("atorch.runtime.precision.fp8_recipe.find_spec", lambda name: None)
        for backend, package in (("te", "transformer_engine"), ("torchao", "torchao"), ("auto", "torchao")):
            with pytest.raises(CapabilityError, match=rf"{package}.*pip install"):
                choose_backend(backend, Fp8Recipe(), None, "cuda")

    def test_auto_prefers_te_on_cuda(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("atorch.runtime.precision.fp8_recipe.find_spec", lambda name: object())
        assert choose_backend("auto", Fp8Recipe(), None, "cuda") == "te"
        assert choose_backend("auto", Fp8Recipe(margin=1), None, "cuda") == "te"
        assert choose_backend("auto", Fp8Recipe(), True, "cuda") == "torchao"
        assert choose_backend("auto", Fp8Recipe(), None, "cpu") == "torchao"


class FakeTe:
    """transformer-engine's surface as documented, and a record of what is asked of it."""

    def __init__(self, *, old: bool) -> None:
        self.log: list[Any] = []
        record = self.log

        class Linear(nn.Linear):
            def __init__(
                self, in_features: int, out_features: int, *, bias: bool, params_dtype: Any, device: Any
            ) -> None:
                super().__init__(in_features, out_features, bias=bias, dtype=params_dtype, device=device)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                record.append("linear")
                return super().forward(x)

        @contextmanager
        def region(**kwargs: Any) -> Iterator[None]:
            record.extend([kwargs, "enter"])
            try:
                yield
            finally:
                record.append("exit")

        def scaling(
            margin: int, fp8_format: str, amax_history_len: int, amax_compute_algo: str, reduce_amax: bool
        ) -> types.SimpleNamespace:
            return types.SimpleNamespace(knobs=(margin, fp8_format, amax_history_len, amax_compute_algo, reduce_amax))

        def old_scaling(interval: int, **kwargs: Any) -> types.SimpleNamespace:
            return types.SimpleNamespace(interval=interval, **vars(scaling(**kwargs)))

        surface: dict[str, dict[str, Any]] = {
            "transformer_engine": {},
            "transformer_engine.pytorch": {"Linear": Linear, "fp8_autocast" if old else "autocast": region},
            "transformer_engine.common": {},
            "transformer_engine.common.recipe": {
                "DelayedScaling": old_scaling if old else scaling,
                "Format": {"HYBRID": "hybrid", "E4M3": "e4m3"},
            },
        }
        self.modules = {}
        for name, attributes in surface.items():
            module = types.ModuleType(name)
            module.__spec__ = importlib.machinery.ModuleSpec(name, None)
            vars(module).update(attributes)
            self.modules[name] = module
        for name, module in self.modules.items():
            parent, _, child = name.rpartition(".")
            if parent:
                vars(self.modules[parent])[child] = module
        self.linear = Linear


@pytest.fixture
def te(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FakeTe:
    fake = FakeTe(old=getattr(request, "param", False))
    for name, module in fake.modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return fake


class TestTransformerEngine:
    def test_layers_keep_their_parameters_and_dtype(self, te: FakeTe) -> None:
        model = small().to(torch.bfloat16)
        parameters = dict(model.named_parameters())
        state = torch.get_rng_state()
        report = convert_linears(model, exclude=("lm_head",), backend="te", device=CUDA)
        assert report.backend == "te"
        assert not report.emulated
        assert report.converted == INNER
        assert type(model["layers"][0][0]) is te.linear
        assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
        assert torch.equal(torch.get_rng_state(), state)

    def test_the_whole_forward_runs_in_one_region(self, te: FakeTe) -> None:
        model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
        group: Any = object()
        recipe = Fp8Recipe(margin=1, fp8_format="E4M3", amax_history_len=16, amax_compute_algo="most_recent")
        convert_linears(model, backend="te", recipe=recipe, device=CUDA, group=group)
        model(torch.randn(2, 16))
        made = te.log[0]
        assert made["enabled"] is True
        assert made["amax_reduction_group"] is group
        assert made["recipe"].knobs == (1, "e4m3", 16, "most_recent", True)
        assert te.log[1:] == ["enter", "linear", "linear", "exit"]

    def test_the_region_is_left_when_the_forward_raises_and_none_is_entered_without_layers(self, te: FakeTe) -> None:
        nothing = nn.Sequential(nn.Linear(8, 8))
        assert convert_linears(nothing, backend="te", device=CUDA).converted == ()
        nothing(torch.randn(2, 8))
        assert te.log == []
        model = nn.Sequential(nn.Linear(16, 16))
        convert_linears(model, backend="te", device=CUDA)
        with pytest.raises(RuntimeError, match="shape"):
            model(torch.randn(2, 8))
        assert te.log[1:] == ["enter", "linear", "exit"]

    @pytest.mark.parametrize("te", [True], indirect=True)
    def test_earlier_releases_have_other_names(self, te: FakeTe) -> None:
        model = nn.Sequential(nn.Linear(16, 16))
        convert_linears(model, backend="te", recipe=Fp8Recipe(interval=4), device=CUDA)
        model(torch.randn(2, 16))
        assert te.log[0]["fp8_recipe"].interval == 4
        assert te.log[0]["fp8_group"] is None

    def test_a_layer_in_two_places_has_no_scale_to_share(self, te: FakeTe) -> None:
        layer = nn.Linear(16, 16)
        model = nn.Sequential(layer, nn.Linear(16, 16), layer)
        report = convert_linears(model, backend="te", device=CUDA)
        assert report.converted == ("1",)
        assert "several places" in report.left[0].reason
        alone = convert_linears(
            nn.Sequential(layer, layer), backend="te", recipe=Fp8Recipe(reduce_amax=False), device=CUDA
        )
        assert alone.converted == ("0",)

    def test_what_the_package_lacks_is_named(self, te: FakeTe, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(CapabilityError, match="interval=4"):
            convert_linears(nn.Sequential(nn.Linear(16, 16)), backend="te", recipe=Fp8Recipe(interval=4), device=CUDA)
        monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", None)
        with pytest.raises(CapabilityError, match=r"built for torch.*pip install transformer-engine"):
            convert_linears(small(), backend="te", device=CUDA)
