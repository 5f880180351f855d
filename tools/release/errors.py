"""The error of everything that stops a release."""

__all__ = ["ReleaseError"]


class ReleaseError(Exception):
    """The release is refused: a sentence for the user, which says what to do."""
