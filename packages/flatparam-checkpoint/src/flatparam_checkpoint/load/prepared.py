"""Everything that a load will change on this rank, read and checked before anything is changed."""

from __future__ import annotations

from typing import final

import attrs

from flatparam_checkpoint.load.loaded import Loaded, rank_extra_of
from flatparam_checkpoint.load.prepared_model import (
    PreparedAverages,
    PreparedModel,
    prepare_averages,
    prepare_model,
)
from flatparam_checkpoint.load.prepared_optimizer import PreparedOptimizer, prepare_optimizer
from flatparam_checkpoint.save import Subject
from flatparam_files import CheckpointReader
from flatparam_runtime import ExchangesValues
from flatparam_state.at_rest import bring_to_rest

__all__ = ["Prepared", "prepare"]


@final
@attrs.frozen(eq=False)
class Prepared:
    """Everything that a load will change, ready."""

    model: PreparedModel | None
    optimizers: list[PreparedOptimizer]
    averages: list[PreparedAverages]
    loaded: Loaded

    def install(self) -> None:
        """Change the optimizers, the model and the averages."""
        for optimizer in self.optimizers:
            optimizer.install()
        if self.model is not None:
            self.model.install()
        for averages in self.averages:
            averages.install()


def prepare(
    reader: CheckpointReader,
    ranks: ExchangesValues,
    subject: Subject,
    strict: bool,
    convert_dtype: bool,
    other_states: bool,
) -> Prepared:
    """Read and check what this rank needs; nothing is changed.

    Raises:
        CheckpointError: if something is damaged, or does not fit.
    """
    model, prepared_model, prepared_optimizers, prepared_averages = subject.model, None, [], []
    if model is not None:
        bring_to_rest(model)
        prepared_model = prepare_model(reader, model, strict=strict, convert_dtype=convert_dtype)
        prepared_optimizers = [
            prepare_optimizer(
                reader,
                model,
                each,
                at,
                other_states=other_states,
                new=prepared_model.missing,
                converted=prepared_model.converted,
            )
            for at, each in subject.optimizers.items()
        ]
        found = [
            prepare_averages(reader, each, at, strict=strict, convert_dtype=convert_dtype)
            for at, each in subject.averages.items()
        ]
        prepared_averages = [each for each in found if each is not None]
    manifest = reader.manifest
    extra = reader.decode(manifest.values.get("extra"))
    mine = rank_extra_of(reader, manifest, ranks.rank) if manifest.world_size == ranks.size else None
    loaded = Loaded(
        manifest.step,
        extra,
        mine,
        manifest.world_size,
        manifest.save_id,
        reader.nbytes_read,
        prepared_model.missing if prepared_model else (),
        prepared_model.unexpected if prepared_model else (),
        reader.path,
    )
    return Prepared(prepared_model, prepared_optimizers, prepared_averages, loaded)
