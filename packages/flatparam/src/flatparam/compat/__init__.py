"""Recognise torch's FSDP enums and configurations, and change attributes of torch's modules."""

from flatparam.compat.translating import LikeTorchs, as_config, as_enum

__all__ = ["LikeTorchs", "as_config", "as_enum"]
