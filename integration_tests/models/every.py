"""All models of the table by name."""

from __future__ import annotations

from integration_tests.models import hub, plain
from integration_tests.models.described import Model

SHORT = {model.name: model for model in plain.MODELS}
EVERY = SHORT | {model.name: model for model in hub.MODELS}


def named(name: str) -> Model:
    """The model of this name."""
    return EVERY[name]
