"""The forms in which the tensors of a state are spread over ranks: full, in chunks, or as their owners hold them."""

from flatparam_state.forms.chunker import OWN_CHUNKER, Chunker, is_dtensor
from flatparam_state.forms.deferred import (
    LazyTensor,
    LazyValue,
    Streamed,
    as_tensor,
    from_first,
    is_ordinary,
    is_tensor_like,
    not_ordinary,
    shape_of,
)
from flatparam_state.forms.flat_tensor import FlatTensor
from flatparam_state.forms.state_form import FormKind, StateForm
from flatparam_state.forms.tiling import Tiling, is_sharded_tensor
from flatparam_state.forms.wanted import Wanted

__all__ = [
    "Chunker",
    "FlatTensor",
    "FormKind",
    "LazyTensor",
    "LazyValue",
    "OWN_CHUNKER",
    "StateForm",
    "Streamed",
    "Tiling",
    "Wanted",
    "as_tensor",
    "from_first",
    "is_dtensor",
    "is_ordinary",
    "is_sharded_tensor",
    "is_tensor_like",
    "shape_of",
    "not_ordinary",
]
