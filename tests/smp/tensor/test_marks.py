"""Which modules are marked for tensor parallelism, by contexts and afterwards."""

import copy
import logging
import threading

import pytest
from torch import nn

import atorch.smp as smp
from atorch.smp.tensor import marked_parameters
from tests.language_models import gpt2


def marked(model: nn.Module) -> set[str]:
    return {name.rpartition(".")[0] for name in marked_parameters(model)}


class Model(nn.Module):
    """The document's example, and what is around it."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(20, 20)
        with smp.tensor_parallelism(num_heads=4):
            self.m0 = nn.Linear(20, 20)
            with smp.tensor_parallelism(enabled=False):
                self.m1 = nn.Linear(20, 20)
                with smp.tensor_parallelism():
                    self.m2 = nn.Embedding(20, 20)
            self.norm = nn.BatchNorm1d(20)
            self.m3 = nn.Sequential(nn.Linear(20, 20, bias=False), nn.ReLU())
            self.before.weight = self.m2.weight  # a module that was there before is not created here
        self.after = nn.Linear(20, 20)


def test_what_is_created_inside_is_marked_and_the_innermost_wins() -> None:
    model = Model()
    assert marked(model) == {"m0", "m2", "norm", "m3.0"}
    marks = smp.tensor_marks(model)
    assert {name: mark.enabled for name, mark in marks.items()} == {
        "m0": True, "m1": False, "m2": True, "norm": True, "m3.0": True,
    }  # fmt: skip
    assert marks["m0"].config == {"num_heads": 4}
    assert marks["m2"].config == {}


def test_marks_go_with_copies_and_not_with_state() -> None:
    model = Model()
    assert smp.tensor_marks(copy.deepcopy(model)) == smp.tensor_marks(model)
    assert not [key for key in model.state_dict() if "smp" in key]


def test_what_exists_is_marked_with_all_below_and_the_last_wins() -> None:
    """The document's second example."""
    model = nn.ModuleDict({"encoder": nn.ModuleDict({"embedding": nn.Embedding(4, 4), "a": nn.Linear(4, 4)})})
    smp.set_tensor_parallelism(model.encoder, True)
    smp.set_tensor_parallelism(model.encoder.embedding, False)
    assert marked(model) == {"encoder.a"}
    smp.set_tensor_parallelism(model.encoder.embedding)
    assert marked(model) == {"encoder.a", "encoder.embedding"}


def test_a_transformers_model_is_marked_as_it_is_made_also_by_a_decorator() -> None:
    assert marked(smp.tensor_parallelism()(lambda: nn.Linear(2, 2))()) == {""}
    with smp.tensor_parallelism():
        model = gpt2(7, 8, 1, 2, 4)
    assert marked_parameters(model) == dict(model.named_parameters(remove_duplicate=False)).keys()


def test_distributed_modules_need_no_mark_but_one_against_them_counts() -> None:
    layer = smp.nn.DistributedTransformerOutputLayer(8, 16)
    assert marked(layer) == {"dense1", "dense2", "layernorm"}
    smp.set_tensor_parallelism(layer.dense2, False)
    assert marked(layer) == {"dense1", "layernorm"}
    with smp.tensor_parallelism(False):
        assert not marked(smp.nn.DistributedTransformerOutputLayer(8, 16))


def test_a_context_ends_with_an_error_and_is_of_one_thread() -> None:
    with pytest.raises(KeyError), smp.tensor_parallelism():
        raise KeyError
    made = [nn.Linear(2, 2)]
    with smp.tensor_parallelism():
        thread = threading.Thread(target=lambda: made.append(nn.Linear(2, 2)))
        thread.start()
        thread.join()
    assert len(made) == 2
    assert not [each for each in made if marked(each)]


def test_says_where_there_is_nothing_to_split(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "atorch"):
        smp.set_tensor_parallelism(nn.LayerNorm(4))
    assert "was given a LayerNorm, in which there is no matrix to split" in caplog.text
