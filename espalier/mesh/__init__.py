"""Where the ranks are: named axes over processes, and how processes start."""

from espalier.mesh.mesh import Mesh, MeshLike, as_mesh
from espalier.mesh.spawn import spawn

__all__ = ["Mesh", "MeshLike", "as_mesh", "spawn"]
