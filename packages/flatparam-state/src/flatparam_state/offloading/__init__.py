"""A model that is out of the way of something else: in host memory or on a disk, and back."""

from flatparam_state.offloading.offload import offload, onload

__all__ = ["offload", "onload"]
