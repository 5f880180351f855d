"""Names: model and optimizer state of sharded models, at any world size and under any wrapping."""

from typing import TYPE_CHECKING

from flatparam_runtime import names_of
from flatparam_state import checkpoint as checkpoint
from flatparam_state.averages import ShardedEMA
from flatparam_state.forms.state_form import FormKind, StateForm
from flatparam_state.model.collect import model_state_dict
from flatparam_state.model.load import load_model_state
from flatparam_state.offloading import offload, onload
from flatparam_state.optimizer.optimizer_collect import optimizer_state_dict
from flatparam_state.optimizer.optimizer_load import load_optimizer_state

if TYPE_CHECKING:
    from flatparam_checkpoint import *  # noqa: F403
    from flatparam_files import *  # noqa: F403
    from flatparam_publish import *  # noqa: F403

__version__ = "0.1.0"

__all__ = [
    "FormKind",
    "ShardedEMA",
    "StateForm",
    "load_model_state",
    "load_optimizer_state",
    "model_state_dict",
    "offload",
    "onload",
    "optimizer_state_dict",
]

_MOVED = {
    "flatparam_checkpoint": """
        Checkpointer Fit fit Loaded Names Optimizers PretrainedFiles read_pretrained UnreadTensor
    """,
    "flatparam_files": """
        averages_as_model cast_model CheckpointError CheckpointReader CheckpointWriter CHUNK_NBYTES chunk_spans DTYPES
        FORMATS join_path Moment OnMoment open_checkpoint open_source read_header SafetensorsHeader select Soundness
        Source split_path Staging StoredTensor TensorFileWriter TensorInfo UnknownFormatError UnreadableError
        Verification verify_checkpoint verify_source watch without_collector write_checkpoint write_dcp
        write_hugging_face write_torch_file
    """,
    "flatparam_publish": """
        Catalogue Channel Delivery GroupChannel Mailbox NewVersion Packet publish Published PublishedTensor Publisher
        PublishError Receiver ReceiverNames Sink Slicing Update UpdateSource VersionId
    """,
}
"""The names that were here, by the add-ons that have them now; here they are promised."""
__all__ += " ".join(_MOVED.values()).split()
__getattr__ = names_of(_MOVED, __name__)
