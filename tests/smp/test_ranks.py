"""The documented ranks, sizes and groups: their tables, by arithmetic and on processes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist

import atorch.smp as smp
from atorch.distributed.mesh import groups_along, own_group
from atorch.smp.config import Config
from atorch.smp.session import AXES_OF, slices
from tests.pool import Pool

KINDS = ("world", "mp", "dp", "pp", "tp", "rdp")
PERMUTATIONS = ["".join(letters) for letters in itertools.permutations("DPT")]

# (configuration, groups of eight processes by kind), as the vendor's documents have them.
PUBLISHED: list[tuple[dict[str, Any], dict[str, list[list[int]]]]] = [
    (
        {"partitions": 2, "placement_strategy": "spread"},
        {"mp": [[0, 4], [1, 5], [2, 6], [3, 7]], "dp": [[0, 1, 2, 3], [4, 5, 6, 7]]},
    ),
    (
        {"partitions": 2, "placement_strategy": "cluster"},
        {"mp": [[0, 1], [2, 3], [4, 5], [6, 7]], "dp": [[0, 2, 4, 6], [1, 3, 5, 7]]},
    ),
    (
        {"partitions": 2, "tensor_parallel_degree": 2, "placement_strategy": "DPT"},
        {
            "tp": [[0, 1], [2, 3], [4, 5], [6, 7]],
            "pp": [[0, 2], [1, 3], [4, 6], [5, 7]],
            "rdp": [[0, 4], [1, 5], [2, 6], [3, 7]],
            "mp": [[0, 1, 2, 3], [4, 5, 6, 7]],
            "dp": [[0, 1, 4, 5], [2, 3, 6, 7]],
        },
    ),
]


def places(config: Config, size: int) -> list[dict[str, int]]:
    """Each rank's place along each axis: the letters of the placement count it, the last one fastest."""
    degrees = {"P": config.partitions, "T": config.tensor_parallel_degree}
    degrees["D"] = size // (degrees["P"] * degrees["T"])
    order = config.placement
    digits = itertools.product(*(range(degrees[letter]) for letter in order))
    return [dict(zip(order, each, strict=True)) for each in digits]


def expected(config: Config, rank: int, size: int = 8) -> dict[str, list[int]]:
    """The ranks of each group of a process: those whose places along the other axes are its own."""
    where = places(config, size)
    fixed = {"world": "", "mp": "D", "dp": "P", "pp": "DT", "tp": "DP", "rdp": "PT"}
    return {
        kind: [other for other in range(size) if all(where[other][a] == where[rank][a] for a in axes)]
        for kind, axes in fixed.items()
    }


@pytest.mark.parametrize(("given", "groups"), PUBLISHED, ids=["spread", "cluster", "DPT"])
def test_published_tables(given: dict[str, Any], groups: dict[str, list[list[int]]]) -> None:
    axes = slices(Config.read({"ddp": True, **given}), 8)
    for kind, ranks in groups.items():
        assert sorted(map(sorted, groups_along(axes, 8, None, AXES_OF[kind]))) == ranks


@pytest.mark.parametrize("placement", ["cluster", "spread", *PERMUTATIONS])
@pytest.mark.parametrize(("pipeline", "tensor"), [(2, 2), (2, 1), (1, 4), (4, 2), (8, 1)])
def test_placements_by_arithmetic(placement: str, pipeline: int, tensor: int) -> None:
    config = Config.read(
        {"partitions": pipeline, "tensor_parallel_degree": tensor, "placement_strategy": placement, "ddp": True}
    )
    axes = slices(config, 8)
    for rank in range(8):
        found = {kind: own_group(rank, axes, range(8), names) for kind, names in AXES_OF.items()}
        assert found == {kind: ranks for kind, ranks in expected(config, rank).items() if kind != "world"}


def found_by_names(rank: int, size: int, given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each configuration: every rank, size and group by its documented name, and a sum over each group."""
    answers = []
    for config in given:
        smp.init(config)
        answer: dict[str, Any] = {"rank": smp.rank(), "size": smp.size()}
        answer |= {"local_rank": smp.local_rank(), "local_size": smp.local_size()}
        for kind in KINDS:
            answer[kind] = getattr(smp, f"get_{kind}_group")()
            group = getattr(smp, f"get_{kind}_process_group")()
            assert dist.get_process_group_ranks(group) == answer[kind]
            total = torch.tensor(2**rank)
            dist.all_reduce(total, group=group)
            assert total.item() == sum(2**each for each in answer[kind])
            if kind != "world":
                answer[f"{kind}_rank"] = getattr(smp, f"{kind}_rank")()
                answer[f"{kind}_size"] = getattr(smp, f"{kind}_size")()
                assert dist.get_rank(group) == answer[f"{kind}_rank"]
        smp.shutdown()
        answers.append(answer)
    return answers


def test_on_four_processes(pool: Pool) -> None:
    tensor = {"tensor_parallel_degree": 2, "placement_strategy": "TDP"}
    given = [{"ddp": True, **config} for config in (tensor, *(config for config, _ in PUBLISHED))]
    for rank, answers in enumerate(pool.run(found_by_names, given, ranks=4)):
        for config, answer in zip(given, answers, strict=True):
            groups = expected(Config.read(config), rank, 4)
            assert {kind: answer[kind] for kind in KINDS} == groups
            assert answer["rank"] == answer["local_rank"] == rank
            assert answer["size"] == answer["local_size"] == 4
            for kind in KINDS[1:]:
                assert answer[f"{kind}_rank"] == groups[kind].index(rank)
                assert answer[f"{kind}_size"] == len(groups[kind])


def test_sharded_replicas_are_replicas() -> None:
    config = Config.read({"ddp": True, "partitions": 2, "sharded_data_parallel_degree": 2})
    for rank in range(8):
        assert own_group(rank, slices(config, 8), range(8), AXES_OF["rdp"]) == expected(config, rank)["rdp"]
        assert own_group(rank, slices(config, 8), range(8), ("zero",)) == [rank // 4 * 4 + rank % 2 + i for i in (0, 2)]
