"""A version of the weights: its tensors and their parts, its bytes, and the channel that it goes through."""

from flatparam_state.publishing.versions.catalogue import (
    Catalogue,
    PublishedTensor,
    ReceiverNames,
    published_tensors,
)
from flatparam_state.publishing.versions.channel import (
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
from flatparam_state.publishing.versions.encoding import (
    HEADER_NBYTES,
    Record,
    bits_of,
    changes,
    read_records,
    values,
)
from flatparam_state.publishing.versions.errors import PublishError, agree_to_publish, all_or_error
from flatparam_state.publishing.versions.slicing import Part, Slicing

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
