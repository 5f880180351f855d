"""The error of publishing, and how the ranks come to raise it together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from flatparam_runtime import ExchangesValues, FlatParamError
from flatparam_state.ranks import CALL, differing

T = TypeVar("T")


class PublishError(FlatParamError):
    """Catch this when a version could not be published or received: receivers still have the version before it."""


def all_or_error(
    exchange: Callable[[tuple[str, T]], list[tuple[str, T]]], fact: T, error: BaseException | None
) -> list[T]:
    """Tell `fact`, and an error if there is one, to all ranks; returns the facts of all, in rank order.

    Raises:
        PublishError: on every rank, naming the first rank that has failed, and why. A rank that was interrupted (by
            `KeyboardInterrupt`, say) raises that again.
    """
    said = "" if error is None else f"{type(error).__name__}: {error}"
    told = exchange((said, fact))
    if error is not None and not isinstance(error, Exception):
        raise error
    for rank, (text, _) in enumerate(told):
        if text:
            raise PublishError(f"rank {rank}: {text}") from error
    return [each for _, each in told]


def agree_to_publish(
    ranks: ExchangesValues, call: str, digest: str, asked: Mapping[str, object], token: str = ""
) -> str:
    """Have all ranks publish the same; every rank calls it.

    Args:
        digest: of the catalogue.
        asked: what else has to be the same, by name.

    Returns:
        The token of the first rank.

    Raises:
        PublishError: on every rank, saying what each rank asks for.
    """
    told = ranks.exchange((token, digest, {CALL: call, **asked}), label="publish")
    found = differing([each for _, _, each in told])
    if found is not None:
        raise PublishError(f"rank {found.rank}: {found.words}; pass the same on every rank")
    for rank, (_, theirs, _) in enumerate(told):
        if theirs != told[0][1]:
            raise PublishError(
                f"rank {rank} publishes other names, shapes or dtypes of tensors than rank 0; pass the same "
                "names=, dtype= and only= on every rank"
            )
    first: str = told[0][0]
    return first
