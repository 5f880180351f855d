"""The place of `flatparam_plan` before it was a package of its own; its public modules are found here for a while."""

import sys
import warnings

from flatparam.addons import load

measuring = sys.modules[f"{__name__}.measuring"] = load("flatparam_plan.costs")
training = sys.modules[f"{__name__}.training"] = load("flatparam_plan.training")
warnings.warn("flatparam.planning has moved: import its names from flatparam_plan", DeprecationWarning, stacklevel=2)
