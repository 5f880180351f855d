"""A version of the weights: its tensors and their parts, its bytes, and the channel that it goes through."""

from flatparam_publish.versions.catalogue import (
    Catalogue,
    PublishedTensor,
    ReceiverNames,
    published_tensors,
)
from flatparam_publish.versions.channel import (
    Channel,
    Delivery,
    Frames,
    NewVersion,
    Packet,
    Update,
    UpdateSource,
    VersionId,
    identity_after,
)
from flatparam_publish.versions.encoding import (
    HEADER_NBYTES,
    Record,
    bits_of,
    changes,
    read_records,
    values,
)
from flatparam_publish.versions.errors import PublishError, agree_to_publish, all_or_error
from flatparam_publish.versions.slicing import Part, Slicing

__all__ = [
    "Catalogue",
    "Channel",
    "Delivery",
    "Frames",
    "HEADER_NBYTES",
    "NewVersion",
    "Packet",
    "Part",
    "PublishError",
    "PublishedTensor",
    "ReceiverNames",
    "Record",
    "Slicing",
    "Update",
    "UpdateSource",
    "VersionId",
    "agree_to_publish",
    "all_or_error",
    "bits_of",
    "changes",
    "identity_after",
    "published_tensors",
    "read_records",
    "values",
]
