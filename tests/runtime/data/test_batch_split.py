"""Batches in pieces: whatever a loader gives, and nothing that cannot be split."""

import types
from collections import OrderedDict, UserDict, defaultdict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch

from atorch.errors import ArgumentError
from atorch.model.pytree import map_leaves
from atorch.runtime.data.batches import merge, num_rows, take


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass(frozen=True)
class Record:
    x: torch.Tensor
    name: str = "a"


X = torch.arange(12).reshape(6, 2)


@pytest.mark.parametrize(
    ("wrap", "get"),
    [
        (lambda x: x, lambda d: d),
        (lambda x: {"x": x}, lambda d: d["x"]),
        (lambda x: OrderedDict(x=x), lambda d: d["x"]),
        (lambda x: UserDict(x=x), lambda d: d["x"]),
        (lambda x: defaultdict(list, x=x), lambda d: d["x"]),
        (lambda x: [x, 3], lambda d: d[0]),
        (lambda x: (None, {"x": [x]}), lambda d: d[1]["x"][0]),
        (lambda x: Pair("a", x), lambda d: d.second),
        (lambda x: Record(x), lambda d: d.x),
    ],
)
def test_tensors_are_cut_wherever_they_are(wrap, get):
    data = wrap(X)
    piece = take(data, 2, 4, 6)
    assert type(piece) is type(data)
    assert torch.equal(get(piece), X[2:4])
    assert get(data) is X
    assert get(piece).untyped_storage().data_ptr() == X.untyped_storage().data_ptr()


def test_transformers_containers_keep_their_class():
    transformers = pytest.importorskip("transformers")
    data = transformers.BatchEncoding({"input_ids": X})
    piece = take(data, 0, 2, 6)
    assert type(piece) is type(data)
    assert torch.equal(piece.input_ids, X[:2])
    output = transformers.modeling_outputs.CausalLMOutput(loss=torch.tensor(1.0), logits=X.float())
    cut = take(output, 0, 2, 6)
    assert torch.equal(cut.logits, X[:2].float())
    assert torch.equal(merge([cut, cut], [0.5, 0.5]).logits, torch.cat([X[:2], X[:2]]).float())


def test_a_mapping_that_cannot_be_written_becomes_a_dict():
    assert map_leaves(lambda leaf, place: leaf + 1, types.MappingProxyType({"x": 1})) == {"x": 2}


def test_what_has_no_rows_goes_to_every_piece_and_lists_of_strings_are_cut():
    scalar, single = torch.tensor(1.0), torch.ones(1, 4)
    data = {
        "x": X,
        "scalar": scalar,
        "single": single,
        "flag": True,
        "size": (6, 6),
        "names": [*"abcdef"],
        "few": ["a"],
    }
    piece = take(data, 2, 4, num_rows(batch=data))
    assert piece["scalar"] is scalar
    assert piece["single"] is single
    assert (piece["size"], piece["names"], piece["few"]) == ((6, 6), ["c", "d"], ["a"])


def test_rows_that_differ_are_refused_with_both_places_and_no_rows_are_one():
    with pytest.raises(ArgumentError, match=r"batch\['x'\] has 6 rows there and args\[0\] has 5"):
        num_rows(batch={"x": X}, args=[torch.ones(5)])
    assert num_rows(batch={"x": torch.tensor(3.0)}) == 1


def test_pieces_are_put_together():
    pieces = [
        (torch.tensor(1.0), {"logits": X[:4], "accuracy": 0.5, "name": "a"}, [torch.tensor(2)]),
        (torch.tensor(4.0), {"logits": X[4:], "accuracy": 0.8, "name": "b"}, [torch.tensor(5)]),
    ]
    loss, more, last = merge(pieces, [2 / 3, 1 / 3])
    assert loss.item() == pytest.approx(2.0)
    assert torch.equal(more["logits"], X)
    assert more["accuracy"] == pytest.approx(0.6)
    assert more["name"] == "b"
    assert last[0].item() == pytest.approx(3.0)
    assert merge([torch.tensor(float("nan")), torch.tensor(2.0)], [0.0, 1.0]).item() == 2.0
