"""A model's modules as text, and the order in which its forward pass calls them and uses parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch.fx
from torch import nn

from flatparam_core import clean_fqn
from flatparam_runtime import unit_of


def sharded_module_tree(model: nn.Module) -> tuple[str, dict[str, list[str]]]:
    """Return the tree of modules in `model` as text, and the parameters of each unit in it.

    The text has a line `name[class]` for each module, indented by four spaces for each module around it; the line of
    a unit ends with ` FULLY SHARDED`. The dict has an entry for each unit that holds parameters: the text of its line,
    without that mark, and the names of its parameters as the model had them before it was sharded.
    """
    lines: list[str] = []
    parameters: dict[str, list[str]] = {}

    def visit(module: nn.Module, name: str, depth: int) -> None:
        shown = f"{name}[{type(module).__name__}]"
        unit = unit_of(module)
        lines.append("    " * depth + shown + (" FULLY SHARDED" if unit is not None else "") + "\n")
        if unit is not None and unit.handles:
            prefix = f"{name}." if name else ""
            parameters[shown] = [clean_fqn(prefix + fqn) for handle in unit.handles for fqn in handle.layout.fqns]
        for child_name, child in module.named_children():
            visit(child, f"{name}.{child_name}" if name else child_name, depth + 1)

    visit(model, "", 0)
    return "".join(lines), parameters


@dataclass
class TracingConfig:
    """How to trace a module.

    `tracer` makes the graph; a library may have one that knows its models. `concrete_args` are the arguments of the
    forward pass that are taken as they are, and not traced: `Tracer.trace` says what they may be.
    """

    tracer: torch.fx.Tracer = field(default_factory=torch.fx.Tracer)
    concrete_args: dict[str, Any] | None = None


class ParameterUse(NamedTuple):
    """Parameters that are used together: by a call of `module`, or by one operation in its forward pass."""

    module: nn.Module
    named_params: list[tuple[str, nn.Parameter]]


@dataclass(init=False, eq=False)
class TracedForward:
    """The calls and uses of a traced forward pass, in its order.

    Invariant: `visited_params` has the elements of `param_forward_order`, to look them up.
    """

    curr_module: nn.Module
    """The module whose forward pass is being traced."""
    module_forward_order: list[nn.Module]
    """The root, then a module for each call of one."""
    module_to_param_usage_infos: dict[nn.Module, list[ParameterUse]]
    """For each module, how its forward pass used parameters: by calling submodules (which use all of theirs, under
    the submodule's names), and in operations of its own (under the root's names)."""
    param_forward_order: list[nn.Parameter]
    """The parameters, each at its first use."""
    visited_params: set[nn.Parameter]

    def __init__(self, root_module: nn.Module) -> None:
        """Begin with nothing but the root."""
        self.curr_module = root_module
        self.module_forward_order = [root_module]
        self.module_to_param_usage_infos = {root_module: []}
        self.param_forward_order = []
        self.visited_params = set()

    def use(self, module: nn.Module, named_params: list[tuple[str, nn.Parameter]]) -> None:
        """Note that the current module's forward pass uses these, in `module`."""
        if named_params:
            usages = self.module_to_param_usage_infos.setdefault(self.curr_module, [])
            usages.append(ParameterUse(module, named_params))

    def visit(self, named_params: list[tuple[str, nn.Parameter]]) -> None:
        """Note that the computation has come to these."""
        for _, parameter in named_params:
            if parameter not in self.visited_params:
                self.visited_params.add(parameter)
                self.param_forward_order.append(parameter)


class ForwardTracer:
    """Watches a tracer: inside of `patch_tracer`, what it traces is noted in `exec_info`, which stays there after."""

    def __init__(self) -> None:
        """Begin with nothing traced."""
        self.exec_info: TracedForward | None = None

    @contextlib.contextmanager
    def patch_tracer(self, tracer: torch.fx.Tracer, root_module: nn.Module) -> Iterator[None]:
        """Watch `tracer` trace `root_module`; on leaving the context the tracer is what it was."""
        self.exec_info = info = TracedForward(root_module)
        call_module, create_proxy = tracer.call_module, tracer.create_proxy
        parameters = dict(root_module.named_parameters())

        def watched_call(
            module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> Any:
            info.module_forward_order.append(module)
            info.use(module, list(module.named_parameters()))
            info.module_to_param_usage_infos.setdefault(module, [])
            before, info.curr_module = info.curr_module, module
            try:
                return call_module(module, forward, args, kwargs)
            finally:
                info.curr_module = before

        def watched_proxy(kind: str, target: Any, args: Any, kwargs: Any, *more: Any, **others: Any) -> Any:
            proxy = create_proxy(kind, target, args, kwargs, *more, **others)
            # A call of a module is one of a leaf: the current module, of which nothing inside is traced.
            if kind == "call_module":
                used = list(info.curr_module.named_parameters())
                info.use(info.curr_module, used)
                info.visit(used)
            elif kind in ("call_function", "call_method"):
                used = _parameters_among((args, kwargs), parameters)
                info.use(info.curr_module, used)
                info.visit(used)
            return proxy

        vars(tracer).update(call_module=watched_call, create_proxy=watched_proxy)
        try:
            yield
        finally:
            vars(tracer).update(call_module=call_module, create_proxy=create_proxy)


def _parameters_among(arguments: Any, parameters: dict[str, nn.Parameter]) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters that an operation is given, wherever in its arguments, under the root's names."""
    found: list[tuple[str, nn.Parameter]] = []

    def look(argument: Any) -> Any:
        if isinstance(argument, torch.fx.Proxy):
            node = argument.node
            if node.op == "get_attr" and node.target in parameters:
                found.append((str(node.target), parameters[str(node.target)]))
        return argument

    torch.fx.node.map_aggregate(arguments, look)
    return found
