"""The processes of a job and the mesh that arranges them."""

from atorch.distributed.mesh import Mesh, parallel_group, parallel_group_size, parallel_rank, rank_table, use_mesh
from atorch.distributed.world import World, init

__all__ = ["Mesh", "World", "init", "parallel_group", "parallel_group_size", "parallel_rank", "rank_table", "use_mesh"]
