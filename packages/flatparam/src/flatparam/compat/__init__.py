"""The part that knows torch's own FSDP: it recognises torch's objects, and can make torch's names ours.

This is the one place of the five packages that may import `torch.distributed.fsdp`, and it does so only in `install`.
"""

from flatparam.compat.translating import LikeTorchs, as_config, as_enum

__all__ = ["LikeTorchs", "as_config", "as_enum"]
