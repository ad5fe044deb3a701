"""Results of a step are on every process of its pipeline, and their tensors arrive in few broadcasts."""

from typing import Any

import torch
from torch import Tensor

import atorch.smp as smp
from atorch.profiler.memory_tracker import CommCounter
from tests.pool import Pool
from tests.smp.job import begun
from tests.smp.test_step import model_of, rows


class Opaque:
    """Whose words say nothing of it."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __repr__(self) -> str:
        return "Opaque"


def stepped(rank: int, size: int) -> list[tuple[Any, int]]:
    answers = []
    with begun({"microbatches": 2, "partitions": size}):
        model = model_of()

        @smp.step(non_split_inputs=["how"])
        def look(model: Any, x: Tensor, how: dict[str, Any]) -> Any:
            out = model(x)
            model.backward(out.mean())
            made: dict[str, Any] = {"mean": out.mean(), "rows": out, "bits": (out > 0).sum()}
            if "number" in how:
                made["number"] = how["number"] + len(x)
            if "opaque" in how:
                made["opaque"] = Opaque(how["opaque"] * len(x))
            if "large" in how:
                made["large"] = out.new_full((1 << 15,), how["large"])
            return made

        ways: list[tuple[int, dict[str, Any]]] = [
            (8, {}), (8, {}), (4, {}), (4, {}),
            (4, {"number": 1}), (4, {"number": 1}), (4, {"number": 2}),
            (4, {"opaque": 1.0}), (4, {"opaque": 2.0}),
            (4, {"large": 1.0}), (4, {"large": 2.0}),
        ]  # fmt: skip
        for count, how in ways:
            with CommCounter() as sent:
                found = look(model, rows(count), how)
            broadcasts = sum(calls for (kind, _), (calls, _) in sent.counts.items() if kind == "broadcast")
            plain = {"rows": found["rows"].concat(), "mean": found["mean"].reduce_mean(), "bits": sum(found["bits"])}
            plain |= {"number": list(found["number"])} if "number" in found else {}
            plain |= {"opaque": [each.value for each in found["opaque"]]} if "opaque" in found else {}
            plain |= {"large": found["large"].outputs[1][-1]} if "large" in found else {}
            answers.append((plain, broadcasts))
    return answers


def test_forms_may_change_and_few_broadcasts_are_needed(pool: Pool) -> None:
    first, second = pool.run(stepped)
    for (one, _), (other, _) in zip(first, second, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(torch.as_tensor(one[name]), torch.as_tensor(other[name])) for name in one)
    made = [each for each, _ in second]
    assert [each["number"] for each in made[4:7]] == [[3, 3], [3, 3], [4, 4]]
    assert [each["opaque"] for each in made[7:9]] == [[2.0, 2.0], [4.0, 4.0]]
    assert [float(each["large"]) for each in made[9:]] == [1.0, 2.0]
    counts = [broadcasts for _, broadcasts in first]
    assert {counts[number] for number in (1, 3, 5, 8, 10)} == {4}, "the form in two, the floats, the whole numbers"
