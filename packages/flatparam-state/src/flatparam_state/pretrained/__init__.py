"""A model's tensors in files of any format, read by ranks of which each needs only a part."""

from flatparam_state.pretrained.files import Names, PretrainedFiles
from flatparam_state.pretrained.fit import Fit, fit
from flatparam_state.pretrained.read import read_pretrained
from flatparam_state.pretrained.unread import UnreadTensor

__all__ = ["Fit", "Names", "PretrainedFiles", "UnreadTensor", "fit", "read_pretrained"]
