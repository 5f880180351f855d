"""What knows torch's own FSDP: its objects are recognised, and its names can be made ours.

This is the one place of the five packages that may import `torch.distributed.fsdp`, and it does so only in `install`.
"""

from flatparam.compat.translating import LikeTorchs, as_config, as_enum

__all__ = ["LikeTorchs", "as_config", "as_enum"]
