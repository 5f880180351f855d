"""The error of publishing, and how the ranks come to raise it together."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from flatparam_runtime import FlatParamError

__all__ = ["PublishError", "all_or_error"]

T = TypeVar("T")


class PublishError(FlatParamError):
    """Catch this when a version could not be published or received: receivers still have the version before it."""


def all_or_error(
    exchange: Callable[[tuple[str, T]], list[tuple[str, T]]], fact: T, error: BaseException | None
) -> list[T]:
    """Tell `fact`, and an error if there is one, to all ranks; returns the facts of all, in rank order.

    Raises:
        PublishError: on every rank, naming the first rank that has failed, and why.
    """
    said = "" if error is None else f"{type(error).__name__}: {error}"
    told = exchange((said, fact))
    for rank, (text, _) in enumerate(told):
        if text:
            raise PublishError(f"rank {rank}: {text}") from error
    return [each for _, each in told]
