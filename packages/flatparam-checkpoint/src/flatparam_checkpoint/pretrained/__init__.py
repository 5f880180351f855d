"""A model's tensors in files of any format, read by ranks of which each needs only a part."""

from flatparam_checkpoint.pretrained.files import Names, PretrainedFiles
from flatparam_checkpoint.pretrained.fit import Fit, fit
from flatparam_checkpoint.pretrained.loading import PretrainedReport, load_pretrained
from flatparam_checkpoint.pretrained.read import read_pretrained
from flatparam_checkpoint.pretrained.unread import UnreadTensor

__all__ = [
    "Fit",
    "Names",
    "PretrainedFiles",
    "PretrainedReport",
    "UnreadTensor",
    "fit",
    "load_pretrained",
    "read_pretrained",
]
