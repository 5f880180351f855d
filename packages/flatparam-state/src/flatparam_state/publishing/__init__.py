"""The weights of a sharded model for those who use them elsewhere: whole, or what has changed."""

from flatparam_state.publishing.catalogue import Catalogue, PublishedTensor, ReceiverNames
from flatparam_state.publishing.channel import (
    Channel,
    Delivery,
    NewVersion,
    Packet,
    Update,
    UpdateSource,
    VersionId,
)
from flatparam_state.publishing.dense import Sink, publish
from flatparam_state.publishing.errors import PublishError
from flatparam_state.publishing.group import GroupChannel
from flatparam_state.publishing.mailbox import Mailbox
from flatparam_state.publishing.publisher import Published, Publisher
from flatparam_state.publishing.slicing import Slicing

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
