"""The base of the optimizers that step whole parameters, and leave the others to AdamW."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn

from flatparam_core import FLAT_PARAM, FlatParamError, clean_fqn, owner_of
from flatparam_optim.matrices.members import WholeStep, drop_flat_gradients, follow_gradients, originals_in, spread_form
from flatparam_optim.matrices.stepper import MatrixStepper
from flatparam_optim.segments.flat_steps import step_in_segments
from flatparam_optim.shape_rules import allow_shards

ADAMW: Final = "adamw"
"""The value under `RULE` of a group of parameters that AdamW steps."""
RULE: Final = "rule"
"""The key of a group that says who steps its parameters."""
_PREFIX: Final = "adamw_"
HALF: Final = (torch.float16, torch.bfloat16)
"""The dtypes of half precision."""

Choice: TypeAlias = Callable[[str, tuple[int, ...]], bool]
"""A function of a parameter's name and full shape: whether it is stepped as a whole."""


def adamw_settings(lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> dict[str, Any]:
    """Return the settings of parameters that are left to `torch.optim.AdamW`, by its names."""
    return {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}


def are_matrices(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether a parameter has two dimensions."""
    return len(shape) == 2


def number(value: Tensor | float) -> Any:
    """`value` as a float; on an accelerator it stays a tensor, in double precision, so that the host need not wait."""
    if isinstance(value, Tensor) and value.device.type != "cpu":
        # Apple's devices have no double precision.
        return value.to(torch.float32 if value.device.type == "mps" else torch.float64)
    return float(value)


def at_least(least: float, value: Tensor | float) -> Any:
    """Return the larger one of two numbers; one of them may be what `number` returns."""
    return value.clamp(min=least) if isinstance(value, Tensor) else max(least, value)


def decay(part: Tensor, factor: Tensor | float) -> None:
    """Multiply `part` by a number, which may be what `number` returns."""
    if isinstance(factor, Tensor) and part.dtype in HALF:
        # Torch would round the factor to half precision first, but not a float.
        part.copy_(part.to(torch.float32) * factor.to(torch.float32))
    else:
        part.mul_(factor)


def add_scaled(part: Tensor, update: Tensor, scale: Tensor | float) -> None:
    """Add `scale` times `update` to `part`, each element as torch adds it in the middle of a tensor, wherever it lies.

    On a CPU torch rounds the last elements of a tensor in half precision otherwise than those before, which it takes a
    register at a time: those it computes in float32, with the scale in half precision.

    Args:
        part: is changed.
        update: of its shape.
        scale: a float, or what `number` returns.
    """
    if isinstance(scale, Tensor):
        wide = torch.float32 if part.dtype in HALF else part.dtype
        part.copy_(torch.addcmul(part.to(wide), update.to(wide), scale.to(wide)))
        return
    if part.dtype != update.dtype or part.dtype not in HALF or part.device.type != "cpu":
        # One whose elements share memory would be added by other instructions than one that has travelled.
        part.add_(update.contiguous(), alpha=scale)
        return
    rounded = torch.tensor(scale, dtype=part.dtype).item()
    part.copy_(torch.add(part.to(torch.float32), update.to(torch.float32), alpha=rounded))


class WholeOptimizer(torch.optim.Optimizer):
    """An optimizer that steps some parameters whole by a rule, and the others by AdamW.

    It holds original parameters: a flat parameter that it is given stands for those in it. Each group that it is given
    becomes up to two, one of whole parameters and one of others, which have the key `"rule"`. In a group that it is
    given, settings are those of the whole parameters, and those that begin with `adamw_` those of the others; with
    `"rule": "adamw"`, all of its parameters are others, and its settings are AdamW's.
    """

    def __init__(
        self,
        params: torch.optim.optimizer.ParamsT,
        rule: WholeStep,
        name: str,
        defaults: Mapping[str, Any],
        others: Mapping[str, Any],
        choice: Choice,
    ) -> None:
        """Make the optimizer.

        Args:
            params: parameters, named parameters or groups of either, as for any optimizer of torch.
            rule: steps whole parameters.
            name: what groups of whole parameters have under `"rule"`.
            defaults: the settings of whole parameters.
            others: the settings of the others, of `torch.optim.AdamW`.
            choice: which parameters are stepped as wholes.
        """
        self._rule, self._name, self._choice = rule, name, choice
        self._others = dict(others)
        self._prepare()
        self._settings = {name: {**defaults, RULE: name}, ADAMW: {**self._adamw.defaults, RULE: ADAMW}}
        super().__init__(params, {"lr": defaults["lr"]})
        allow_shards(self)

    def _prepare(self) -> None:
        """Make what steps; a copy does so by itself."""
        self._adamw = torch.optim.AdamW([nn.Parameter(torch.empty(0))], **self._others)
        self._stepper = MatrixStepper(self._rule)
        self._home = id(self)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy."""
        return {**super().__getstate__(), "_own": (self._rule, self._name, self._choice, self._others, self._settings)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy, or take the state that was loaded."""
        own = state.pop("_own", None)
        super().__setstate__(state)
        if own is not None:
            self._rule, self._name, self._choice, self._others, self._settings = own
            self._prepare()
            allow_shards(self)
        self._stepper.plan_anew()
        for group in self.param_groups:
            for name, value in self._settings[group[RULE]].items():
                group.setdefault(name, value)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; see this class for its settings."""
        given = param_group["params"]
        if isinstance(given, (set, frozenset)):
            raise TypeError("expected parameters in an order that is the same on every rank, found a set")
        entries = [given] if isinstance(given, torch.Tensor) else list(given)
        chosen: dict[str, list[Any]] = {self._name: [], ADAMW: []}
        forced = param_group.get(RULE)
        if forced not in (None, *chosen):
            raise ValueError(f"expected {self._name!r} or 'adamw' as the rule of a parameter group, found {forced!r}")
        held = {id(parameter) for group in self.param_groups for parameter in group["params"]}
        for name, entry, shape in _originals(entries):
            if id(entry[1] if isinstance(entry, tuple) else entry) in held:
                # As torch says it, and before one of two groups is added.
                raise ValueError("some parameters appear in more than one parameter group")
            rule = forced or (self._name if self._choice(name or "", shape) else ADAMW)
            if rule == self._name:
                self._check(name, shape)
                _check_has_parts(name, entry[1] if isinstance(entry, tuple) else entry, self._name)
            chosen[rule].append(entry)
        if not any(chosen.values()):
            # As with any optimizer of torch, a group may be empty, and is one group then.
            chosen = {forced or self._name: []}
        for rule, parameters in chosen.items():
            if parameters or len(chosen) == 1:
                settings = self._of_rule(rule, param_group, is_forced=forced is not None)
                super().add_param_group({**self._settings[rule], **settings, "params": parameters})

    def _of_rule(self, rule: str, group: Mapping[str, Any], *, is_forced: bool) -> dict[str, Any]:
        """Return the settings in a given group that are about the parameters of one rule."""
        own = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        if is_forced:
            return own
        if rule == ADAMW:
            return {key.removeprefix(_PREFIX): value for key, value in own.items() if key.startswith(_PREFIX)}
        return {key: value for key, value in own.items() if not key.startswith(_PREFIX)}

    def _check(self, name: str | None, shape: tuple[int, ...]) -> None:
        """Refuse a parameter that the rule cannot step as a whole."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all parameters that have a gradient; every rank calls it.

        The host does not wait for an accelerator, but once for each bucket of offloaded parameters.

        Args:
            closure: computes the loss anew, and its gradients.

        Returns:
            What the closure returns.

        Raises:
            FlatParamError: on every rank, if only some ranks that hold a part of a matrix have its gradient. On the
                CPU nothing has changed then; on an accelerator the error comes one step late.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._home != id(self):
            # Somebody has copied what this object has, one attribute after the other.
            self._prepare()
        follow_gradients(parameter for group in self.param_groups for parameter in group["params"])
        whole = [group for group in self.param_groups if group[RULE] != ADAMW]
        self._stepper.step(whole, self.state.__getitem__, self._step_others)
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return the state, as any optimizer of torch.

        Raises:
            FlatParamError: if the last step was wrong, of which the host of an accelerator learns now; see `step`.
        """
        self._stepper.check_gradients()
        return super().state_dict()

    def first_state_of(self, parameter: nn.Parameter, settings: Mapping[str, Any]) -> dict[str, Any] | None:
        """The state of a parameter before its first step, for what is loaded into it; `None` if AdamW steps it."""
        if settings[RULE] == ADAMW:
            return None
        return self._stepper.first_state(parameter, settings)

    def part_states_of(self, settings: Mapping[str, Any]) -> frozenset[str] | None:
        """Return the states of a group's parameters that are cut like them; `None` if all are that have their shape."""
        return None if settings[RULE] == ADAMW else self._rule.part_states

    def _step_others(self) -> None:
        groups = [group for group in self.param_groups if group[RULE] == ADAMW]
        if groups:
            self._adamw.param_groups, self._adamw.state = groups, self.state
            step_in_segments(self._adamw)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, or set them to zero."""
        super().zero_grad(set_to_none)
        if set_to_none:
            drop_flat_gradients(parameter for group in self.param_groups for parameter in group["params"])

    @property
    def whole_steps(self) -> int:
        """How many times this rank has stepped a whole parameter: over all ranks, once a step for each."""
        return self._stepper.stepped


def _check_has_parts(name: str | None, parameter: Any, rule: str) -> None:
    owner = owner_of(parameter)
    form = None if owner is None else spread_form(*owner)
    if form is not None and not form.is_interval and form.box is None:
        raise FlatParamError(
            f"{name!r} is a DTensor with {form.placements}: {rule} brings matrices together of which each rank has an "
            f"interval or a box, as with Shard; give it to AdamW ({RULE}='adamw' in its group)"
        )


def _originals(entries: Iterable[Any]) -> Iterator[tuple[str | None, Any, tuple[int, ...]]]:
    """The originals in what an optimizer is given: name, parameter (with its name, if it had one), and full shape."""
    for entry in entries:
        if not isinstance(entry, tuple):
            if not isinstance(entry, nn.Parameter):
                # torch's own check says what is wrong.
                yield None, entry, ()
                continue
            for inner, parameter, shape in originals_in(entry):
                yield inner, parameter, shape
            continue
        name, given = entry
        for inner, parameter, shape in originals_in(given):
            full = clean_fqn(name)
            if full.endswith(FLAT_PARAM):
                # The flat parameter is an attribute of the module that the names inside begin below.
                full = full.removesuffix(FLAT_PARAM) + inner
            yield full, (full, parameter), shape
