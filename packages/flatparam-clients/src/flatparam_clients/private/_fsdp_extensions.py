"""FSDP1's module of extensions: its names."""

from flatparam.sharding.extensions import FSDPExtensions
from flatparam.sharding.extensions import set_extensions as _set_fsdp_extensions
from flatparam_meshes import DTensorExtensions

__all__ = ["DTensorExtensions", "FSDPExtensions", "_set_fsdp_extensions"]
