"""Where the ranks are: named axes over processes, and how processes start."""

from espalier.mesh.launch import spawn
from espalier.mesh.mesh import Mesh, MeshLike, as_mesh

__all__ = ["Mesh", "MeshLike", "as_mesh", "spawn"]
