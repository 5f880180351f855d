"""A certificate of gradients: any sharding engine, on CPU, beside one process that does all the work.

The names are imported on first use, so that the command line can answer without importing torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flatparam.addons import lazily

if TYPE_CHECKING:
    from flatparam_certify.case import Case
    from flatparam_certify.certificate import Certificate, Finding
    from flatparam_certify.certifying import certify
    from flatparam_certify.meshes import CertifyError
    from flatparam_certify.trainer import Trainer

__version__ = "0.1.0"

__all__ = ["Case", "Certificate", "CertifyError", "Finding", "Trainer", "certify"]


_HOMES = {
    "flatparam_certify.case": ("Case",),
    "flatparam_certify.certificate": ("Certificate", "Finding"),
    "flatparam_certify.certifying": ("certify",),
    "flatparam_certify.meshes": ("CertifyError",),
    "flatparam_certify.trainer": ("Trainer",),
}
"""The modules that have the names which this package exports."""
__getattr__ = lazily(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
