"""The names that transformers gives to the tensors of files when it loads a model of its own."""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import Any, Final

from torch import nn

__all__ = ["renamed_by_transformers"]

_MODELS: Final = "transformers.modeling_utils"
_MAPPINGS: Final = "transformers.conversion_mapping"
_LOADING: Final = "transformers.core_model_loading"


def renamed_by_transformers(
    model: nn.Module, missing: Collection[str], unexpected: Collection[str]
) -> dict[str, str]:
    """Which of the `unexpected` names in files `from_pretrained` takes for names that `model` has and they lack.

    Some models have other names in files than in memory, for the sake of older files; and the files of a model without
    a head have names without the prefix that the same tensors have beneath a head. It is empty if `model` is not one of
    transformers 5. Tensors that transformers puts together out of several (experts, say) are not among them.
    """
    kind = getattr(sys.modules.get(_MODELS), "PreTrainedModel", None)
    transforms: Any = getattr(sys.modules.get(_MAPPINGS), "get_model_conversion_mapping", None)
    rename: Any = getattr(sys.modules.get(_LOADING), "rename_source_key", None)
    renaming: Any = getattr(sys.modules.get(_LOADING), "WeightRenaming", None)
    if kind is None or not isinstance(model, kind) or None in (transforms, rename, renaming):
        return {}
    renamings = [each for each in transforms(model) if isinstance(each, renaming)]
    prefix = getattr(model, "base_model_prefix", None) or None
    # It asks whether a value is None.
    wanted = dict.fromkeys(missing, True)
    new_names = ((name, rename(name, renamings, [], prefix, wanted)[0]) for name in unexpected)
    return {name: new for name, new in new_names if new in wanted}
