"""The weights of a sharded model for those who use them elsewhere: whole, or what has changed.

Receivers need no ranks, and no sharded model. See the guide `docs/guides/publishing.md`.
"""

from flatparam_publish.catalogue import Catalogue, PublishedTensor, ReceiverNames
from flatparam_publish.channel import Channel, Delivery, NewVersion, Packet, Update, UpdateSource, VersionId
from flatparam_publish.dense import Sink, publish
from flatparam_publish.group import GroupChannel
from flatparam_publish.mailbox import Mailbox
from flatparam_publish.publish_error import PublishError
from flatparam_publish.publisher import Published, Publisher
from flatparam_publish.receiver import Receiver
from flatparam_publish.slicing import Slicing

__version__ = "0.1.0"

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
    "Receiver",
    "ReceiverNames",
    "Sink",
    "Slicing",
    "UpdateSource",
    "Update",
    "VersionId",
    "publish",
]
