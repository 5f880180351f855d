"""The modules of a sharded model as text, and the parameters of its units."""

from __future__ import annotations

from torch import nn

from flatparam_core import clean_fqn
from flatparam_runtime import unit_of

__all__ = ["sharded_module_tree"]


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
            parameters[shown] = [
                clean_fqn(prefix + fqn) for handle in unit.handles for fqn in handle.layout.fqns
            ]
        for child_name, child in module.named_children():
            visit(child, f"{name}.{child_name}" if name else child_name, depth + 1)

    visit(model, "", 0)
    return "".join(lines), parameters
