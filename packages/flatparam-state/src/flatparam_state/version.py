"""The version of this package, in the one place that its modules can all import."""

__all__ = ["__version__"]

__version__ = "0.1.0"
