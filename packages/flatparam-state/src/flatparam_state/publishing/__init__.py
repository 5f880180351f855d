"""The weights of a sharded model for those who use them elsewhere: whole, or what has changed."""

from flatparam_state.publishing.dense import publish
from flatparam_state.publishing.giving import Sink
from flatparam_state.publishing.group import GroupChannel
from flatparam_state.publishing.mailbox import Mailbox
from flatparam_state.publishing.publisher import Published, Publisher
from flatparam_state.publishing.versions import (
    Catalogue,
    Channel,
    Delivery,
    NewVersion,
    Packet,
    PublishedTensor,
    PublishError,
    ReceiverNames,
    Slicing,
    Update,
    UpdateSource,
    VersionId,
)

__all__ = [
    "Catalogue",
    "Channel",
    "Delivery",
    "GroupChannel",
    "Mailbox",
    "NewVersion",
    "Packet",
    "PublishError",
    "Published",
    "PublishedTensor",
    "Publisher",
    "ReceiverNames",
    "Sink",
    "Slicing",
    "UpdateSource",
    "Update",
    "VersionId",
    "publish",
]
