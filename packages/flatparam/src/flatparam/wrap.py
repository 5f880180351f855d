"""FSDP1's module of policies and of wrapping by hand: its names, which users import from here."""

from typing import TYPE_CHECKING

from flatparam.addons import lazily
from flatparam.policies.by_hand import _ConfigAutoWrap as _ConfigAutoWrap
from flatparam.policies.by_hand import enable_wrap, wrap
from flatparam.policies.choosing import _recursive_wrap as _recursive_wrap
from flatparam.policies.policy import (
    CustomPolicy,
    ModuleWrapPolicy,
    always_wrap_policy,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)
from flatparam.policies.policy import (
    _module_wrap_policy as _module_wrap_policy,
)
from flatparam.policies.policy import (
    _or_policy as _or_policy,
)
from flatparam.policies.policy import (
    _Policy as _Policy,
)
from flatparam.policies.policy import (
    _wrap_module_cls_individually as _wrap_module_cls_individually,
)

if TYPE_CHECKING:
    from flatparam_plan import PlannedPolicy, planned

__all__ = [
    "CustomPolicy",
    "ModuleWrapPolicy",
    "PlannedPolicy",
    "always_wrap_policy",
    "enable_wrap",
    "lambda_auto_wrap_policy",
    "planned",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
    "wrap",
]

__getattr__ = lazily(__name__, {"flatparam_plan": ("PlannedPolicy", "planned")})
