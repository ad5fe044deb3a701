"""The documented ranks, sizes and groups: their tables, by arithmetic and on processes."""

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist

import atorch.smp as smp
from atorch.distributed.mesh import groups_along, own_group
from atorch.smp.config import Config
from atorch.smp.session import AXES_OF, slices
from tests.pool import on_ranks
from tests.smp.job import begun

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


@on_ranks(4)
def test_on_four_processes(rank: int, size: int) -> None:
    """Every rank, size and group by its documented name, and a sum over each group."""
    tensor = {"tensor_parallel_degree": 2, "placement_strategy": "TDP"}
    for config in (tensor, *(config for config, _ in PUBLISHED)):
        groups = expected(Config.read({"ddp": True, **config}), rank, 4)
        with begun({"ddp": True, **config}):
            assert (smp.rank(), smp.local_rank(), smp.size(), smp.local_size()) == (rank, rank, 4, 4)
            for kind in KINDS:
                assert getattr(smp, f"get_{kind}_group")() == groups[kind]
                group = getattr(smp, f"get_{kind}_process_group")()
                assert dist.get_process_group_ranks(group) == groups[kind]
                total = torch.tensor(2**rank)
                dist.all_reduce(total, group=group)
                assert total.item() == sum(2**each for each in groups[kind])
                if kind != "world":
                    place = getattr(smp, f"{kind}_rank")()
                    assert place == dist.get_rank(group) == groups[kind].index(rank)
                    assert getattr(smp, f"{kind}_size")() == len(groups[kind])


def test_sharded_replicas_are_replicas() -> None:
    config = Config.read({"ddp": True, "partitions": 2, "sharded_data_parallel_degree": 2})
    for rank in range(8):
        assert own_group(rank, slices(config, 8), range(8), AXES_OF["rdp"]) == expected(config, rank)["rdp"]
        assert own_group(rank, slices(config, 8), range(8), ("zero",)) == [rank // 4 * 4 + rank % 2 + i for i in (0, 2)]
