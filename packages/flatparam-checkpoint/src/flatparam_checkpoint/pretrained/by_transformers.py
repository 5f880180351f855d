"""The tensors of files as transformers loads them into a model of its own: names, and tensors that it joins or cuts."""

from __future__ import annotations

import copy
import sys
from collections.abc import Collection
from typing import Any, Final, final

import attrs
from torch import nn

from flatparam_checkpoint.pretrained.files import PretrainedFiles
from flatparam_checkpoint.pretrained.unread import UnreadTensor
from flatparam_files import CheckpointError

_MODELS: Final = "transformers.modeling_utils"
_MAPPINGS: Final = "transformers.conversion_mapping"
_LOADING: Final = "transformers.core_model_loading"


def as_transformers_loads(
    model: nn.Module, files: PretrainedFiles, missing: Collection[str], unexpected: Collection[str]
) -> PretrainedFiles:
    """The files, with what `from_pretrained` makes of `unexpected` tensors for names that `model` has and they lack.

    Some models have other names in files than in memory, for the sake of older files; the files of a model without a
    head have names without the prefix that the same tensors have beneath a head; and the experts of a layer are one
    tensor in memory and many in files. The rules are those of the installed transformers. A tensor stays as it is if
    `model` is not one of transformers 5, or if a rule takes more than joining and cutting.

    Raises:
        CheckpointError: if two names of the files become one.
    """
    rules = _Rules.of(model)
    if rules is None:
        return files
    # It asks whether a value is None.
    wanted = dict.fromkeys(missing, True)
    renamed: dict[str, str] = {}
    by_pattern = {pattern: each for each in rules.converters for pattern in each.source_patterns}
    converters: dict[str, Any] = {}
    sources: dict[str, list[str]] = {}
    for name in sorted(unexpected, key=rules.in_order):
        new, pattern = rules.renamed(name, wanted)
        if new not in wanted:
            continue
        if pattern is None:
            if new in renamed:
                raise CheckpointError(
                    f"{files.path}: transformers renames both {renamed[new]!r} and {name!r} to {new!r}; pass mapping=, "
                    "which says what each is called in the model",
                    path=files.path,
                    fqn=new,
                )
            renamed[new] = name
        else:
            converter = converters.setdefault(new, copy.deepcopy(by_pattern[pattern]))
            converter.add_tensor(new, name, pattern, files.unread(name))
            sources.setdefault(new, []).append(name)
    made = {new: files.unread(name) for new, name in renamed.items()}
    used = [*renamed.values()]
    for new, converter in converters.items():
        try:
            converted = converter.convert(new, model=model, config=getattr(model, "config", None))
        # It is a rule of somebody else's, which was written for tensors that have values.
        except Exception:
            continue
        found = {name: each[0] if isinstance(each, list) else each for name, each in converted.items()}
        # What a rule makes in any other way than by joining and cutting stays, and is reported as unexpected.
        if all(isinstance(each, UnreadTensor) for each in found.values()):
            made |= found
            used += sources[new]
    return files.with_tensors(made, used)


@final
@attrs.frozen
class _Rules:
    """The rules by which transformers 5 loads one model."""

    prefix: str | None
    renamings: list[Any]
    converters: list[Any]
    rename: Any
    in_order: Any
    """The key by which names are sorted, so that expert 10 comes after expert 9."""

    @classmethod
    def of(cls, model: nn.Module) -> _Rules | None:
        """Return those for `model`; None if it is not a model of transformers 5, which has to be imported."""
        kind = getattr(sys.modules.get(_MODELS), "PreTrainedModel", None)
        transforms: Any = getattr(sys.modules.get(_MAPPINGS), "get_model_conversion_mapping", None)
        loading = sys.modules.get(_LOADING)
        names = ("rename_source_key", "dot_natural_key", "WeightRenaming", "WeightConverter")
        rename, in_order, renaming, converter = (getattr(loading, name, None) for name in names)
        if kind is None or not isinstance(model, kind):
            return None
        if transforms is None or rename is None or in_order is None or renaming is None or converter is None:
            return None
        every = transforms(model)
        return cls(
            getattr(model, "base_model_prefix", None) or None,
            [each for each in every if isinstance(each, renaming)],
            [each for each in every if isinstance(each, converter)],
            rename,
            in_order,
        )

    def renamed(self, name: str, wanted: dict[str, bool]) -> tuple[str, str | None]:
        """Return the name in the model, or the first of them, and the pattern by which the tensor is joined or cut."""
        new, pattern = self.rename(name, self.renamings, self.converters, self.prefix, wanted)
        if new not in wanted and name in wanted:
            new, pattern = self.rename(name, [], [], self.prefix, wanted)
        return new, pattern
