"""The names of torch that the packages use, read from their sources, and which of them a torch lacks.

    python tools/matrix/names.py    what the torch of this Python lacks, as JSON

Standard library and torch only, as it is run in every environment.
"""

from __future__ import annotations

import ast
import functools
import importlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

__all__ = ["INSTEAD", "OF_OBJECTS", "lacks", "names_used", "private_attributes", "private_names", "unplaced"]

ROOT: Final = Path(__file__).resolve().parents[2]

#: Names that some torch lacks, and what the packages do there.
INSTEAD: Final[Mapping[str, str]] = {
    "torch.distributed.all_gather_single": "calls `all_gather_into_tensor`, its name before",
    "torch.distributed.reduce_scatter_single": "calls `reduce_scatter_tensor`, its name before",
    "torch.distributed.all_gather_into_tensor": "calls `all_gather_single`, its name since 2.13",
    "torch.distributed.reduce_scatter_tensor": "calls `reduce_scatter_single`, its name since 2.13",
    "torch.UntypedStorage._swap_data_ptr_": (
        "gives the memory of freed buffers back to the system, and keeps none for the next buffer (CPU only); plans "
        "have torch allocate memory that nobody touches"
    ),
}

#: Private attributes of torch's objects, by name: the object that has them, as an expression.
OF_OBJECTS: Final[Mapping[str, str]] = {
    "_base": "torch.empty(0)",
    "_buffers": "torch.nn.Module()",
    "_cdata": "torch.UntypedStorage",
    "_devices": "torch._C._distributed_c10d.ProcessGroupGloo._Options",
    "_enabled": "torch.amp.GradScaler('cpu')",
    "_engine_run_backward": "torch.autograd.graph",
    "_get_backend": "torch.distributed.ProcessGroup",
    "_get_sequence_number_for_group": "torch.distributed.ProcessGroup",
    "_get_root_mesh": "torch.distributed.device_mesh.DeviceMesh",
    "_concatenate": "torch.distributed.device_mesh.DeviceMesh",
    "_grouped_mm": "torch.ops.aten",
    "_init_group": "torch.optim.AdamW",
    "_is_profiler_enabled": "torch.autograd.profiler",
    "_is_view": "torch.empty(0)",
    "_lazy_init_scale_growth_tracker": "torch.amp.GradScaler",
    "_len_torch_dispatch_stack": "torch._C",
    "_load_from_state_dict": "torch.nn.Module",
    "_load_state_dict_post_hooks": "torch.nn.Module()",
    "_forward_hooks": "torch.nn.Module()",
    "_load_state_dict_pre_hooks": "torch.nn.Module()",
    "_register_state_dict_hook": "torch.nn.Module()",
    "_global_optimizer_post_hooks": "torch.optim.optimizer",
    "_global_optimizer_pre_hooks": "torch.optim.optimizer",
    "_optimizer_step_post_hooks": "torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])",
    "_optimizer_step_pre_hooks": "torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])",
    # Its constructor sets it on a parameter of another class.
    "_is_param": "type('Made', (), dict.fromkeys(torch.nn.Parameter.__new__.__code__.co_names))",
    "_local_scalar_dense": "torch.ops.aten",
    "_local_tensor": "torch.distributed.tensor.DTensor",
    "_metadata": "torch.nn.Module().state_dict()",
    "_non_persistent_buffers_set": "torch.nn.Module()",
    "_parameters": "torch.nn.Module()",
    "_patched_state_dict": "torch.distributed.checkpoint.state_dict",
    # Its constructor sets it.
    "_process_group": (
        "type('Made', (), dict.fromkeys("
        "torch.distributed._shard.sharded_tensor.ShardedTensor._prepare_init.__code__.co_names))"
    ),
    "_process_group_name": "torch.distributed.distributed_c10d",
    "_get_split_source": "torch.distributed.distributed_c10d",
    "_schema": "torch.ops.aten.add.Tensor",
    "_sequence_nr": "torch.ones(1, requires_grad=True).exp().grad_fn",
    "_swap_data_ptr_": "torch.UntypedStorage",
    "_timeout": "torch._C._distributed_c10d.Backend.Options",
    "_unsafe_view": "torch.ops.aten",
    "_update_default_pg": "torch.distributed.distributed_c10d",
    "_use_count": "torch.empty(0)",
    "_version": "torch.empty(0)",
    "_to_copy": "torch.ops.aten",
    "_torchdynamo_disable": "torch.compiler.disable(lambda: None)",
}
#: Private attributes of objects of the standard library and of accelerate, and those that we give to torch's.
_NOT_TORCHS: Final = frozenset(
    {
        "_SubParsersAction",
        "_average_model",
        "_current_exceptions",
        "_current_frames",
        "_exit",
        "_flatparam_owner",
        "_getframe",
        "_hollow_block",
        "_initializing",
        "_shared_state",
        "_wrap_overrides",
    }
)


def names_used() -> list[str]:
    """Return every name of torch that the packages' sources use, in full."""
    found: set[str] = set()
    for tree in _sources():
        found |= _dotted(tree) | set(_looked_up(tree))
    for attribute in private_attributes() & OF_OBJECTS.keys():
        found.add(f"{OF_OBJECTS[attribute]}.{attribute}")
    return sorted(found)


def private_names() -> list[str]:
    """Return those of them that torch does not promise to keep."""
    return [name for name in names_used() if re.search(r"\._[a-zA-Z]", name)]


def unplaced() -> list[str]:
    """Return the private attributes in the sources of which nobody has said whose they are."""
    return sorted(private_attributes() - OF_OBJECTS.keys() - _NOT_TORCHS - _parts_of_dotted())


def lacks() -> list[str]:
    """Return the names that the torch of this process does not have."""
    return [name for name in names_used() if not _is_there(name)]


@functools.cache
def _sources() -> tuple[ast.Module, ...]:
    files = sorted((ROOT / "packages").glob("*/src/**/*.py"))
    return tuple(ast.parse(file.read_text(encoding="utf-8")) for file in files)


@functools.cache
def _dotted(tree: ast.Module) -> frozenset[str]:
    return frozenset(_each_dotted(tree))


def _each_dotted(tree: ast.Module) -> Iterator[str]:
    """What is imported of torch, and the chains of attributes that begin at such an import."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                if each.name.split(".")[0] == "torch":
                    yield each.name
                    names[each.asname or "torch"] = each.name if each.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for each in node.names:
                yield f"{node.module}.{each.name}"
                names[each.asname or each.name] = f"{node.module}.{each.name}"
    shorter = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in shorter:
            root, *rest = _chain(node)
            if root in names:
                yield ".".join([names[root], *rest])


def _chain(node: ast.expr) -> list[str]:
    if isinstance(node, ast.Attribute):
        return [*_chain(node.value), node.attr]
    return [node.id] if isinstance(node, ast.Name) else [""]


def _looked_up(tree: ast.Module) -> Iterator[str]:
    """The functions that the two seams look up: `first_of` in comm, and `_private` in the runtime."""
    below = {"first_of": "torch.distributed", "_private": "torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in below:
            for each in node.args:
                if isinstance(each, ast.Constant):
                    yield f"{below[node.func.id]}.{each.value!s}"


@functools.cache
def private_attributes() -> frozenset[str]:
    """Return the private attributes that are read in the sources, and that no class or function of ours defines."""
    ours: set[str] = set()
    read: set[str] = set()
    for tree in _sources():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                ours.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                ours.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                (ours if _chain(node)[0] in ("self", "cls") else read).add(node.attr)
            # Also `partial(getattr, ...)`.
            elif isinstance(node, ast.Call) and any(
                _chain(n) in (["getattr"], ["hasattr"]) for n in (node.func, *node.args)
            ):
                read |= _strings(node.args)
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                if node.targets[0].id == "__slots__":
                    ours |= _strings(ast.walk(node.value))
            elif isinstance(node, ast.Attribute):
                read.add(node.attr)
    return frozenset(name for name in read - ours if re.match(r"_[a-zA-Z]", name))


def _strings(nodes: Iterable[ast.AST]) -> set[str]:
    return {each.value for each in nodes if isinstance(each, ast.Constant) and isinstance(each.value, str)}


def _parts_of_dotted() -> set[str]:
    return {part for tree in _sources() for name in _dotted(tree) for part in name.split(".")}


def _is_there(name: str) -> bool:
    import torch

    if "(" in name:  # an attribute of an object, which is made for it
        owner, _, attribute = name.rpartition(".")
        return hasattr(eval(owner, {"torch": torch}), attribute)
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:end]))
        except ImportError:
            continue
        return _has(found, parts[end:])
    return False


def _has(found: Any, attributes: list[str]) -> bool:
    for attribute in attributes:
        if not hasattr(found, attribute):
            return False
        found = getattr(found, attribute)
    return True


if __name__ == "__main__":
    print(json.dumps(lacks()))
