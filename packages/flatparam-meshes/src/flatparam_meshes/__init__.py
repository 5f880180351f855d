"""Parameters on meshes beside that of data parallelism: tensor parallelism, and experts."""

from flatparam_meshes.experts import hold_experts
from flatparam_meshes.form import KEEPS_ROWS, DTensorExtensions, MeshForm
from flatparam_meshes.kept_parts import KeptParts
from flatparam_meshes.meta_device import join_forms
from flatparam_meshes.unit_meshes import UnitMeshes

__version__ = "0.1.0"

__all__ = ["KEEPS_ROWS", "DTensorExtensions", "KeptParts", "MeshForm", "UnitMeshes", "hold_experts", "join_forms"]
