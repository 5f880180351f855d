"""The seam to autograd, and to the tools around it: every private function of torch that this package calls is here.

| name of torch | what it tells | if it is gone |
| --- | --- | --- |
| `_C._current_graph_task_id` | which autograd run this thread is in | a backward pass raises an error that names it |
| `_C._will_engine_execute_node` | whether this run computes what arrives at a node | the same |
| `autograd.graph.Node._sequence_nr` | which of several nodes runs first | units wait for the gradients of all inputs |
| `Tensor._base` | of which tensor another one is a view | an error that names it |
| `Variable._execution_engine.queue_callback` | when autograd has computed everything | the same |
| `autograd.profiler._is_profiler_enabled` | whether somebody profiles | no ranges are shown |
| `autograd.graph._engine_run_backward` | that a backward pass has raised | nobody is told of what it was |
| `_C._len_torch_dispatch_stack`, `utils._python_dispatch` | which dispatch modes are on | none is turned off |
| `nn.Module._forward_hooks` | the order of a module's hooks | an error that names it |
| `_C._dynamo.eval_frame` | which functions `torch.compile` leaves as they are | `torch.compiler.disable` is used |
| `nn.Module.___needs_generation_tag_patch` | whether Dynamo has run anything | it counts as having run |
| `nn.Module._compiled_call_impl` | what is called instead of a module | past a wrapper only its `forward` is watched |
| `_C._is_any_autocast_enabled`, `_C._is_tracing`, `Tensor._use_count` | what their names say | an error that names it |
| `_C._functorch.get_interpreter_stack` | which transforms of `torch.func` are under way | such a pass fails later |

Two private methods of public classes are named elsewhere: `unit/calls.py` finds `nn.Module._call_impl` on the stack,
and `optimizers` stands in for `Optimizer._init_group`.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import profiler
from torch.autograd.graph import Node, get_gradient_edge

from flatparam_comm import FlatParamError

_ACCUMULATES: Final = 2**64 - 1
"""The number of nodes that accumulate a leaf's gradient; that of others counts the nodes that a thread has made."""

_NOT_PATCHED: Final = "___needs_generation_tag_patch"
"""The attribute of `nn.Module` that is false once Dynamo has patched it."""
CALL: Final = "_compiled_call_impl"
"""The attribute of a module that has what is called in its place, with all its hooks; `compile()` sets it."""

#: Whether a profiler is on. A profiler sets an attribute: to ask autograd for the same takes longer than all the rest.
is_profiled: Final[Callable[[], bool]] = functools.partial(getattr, profiler, "_is_profiler_enabled", False)

Arguments = ParamSpec("Arguments")
Key = TypeVar("Key")
Result = TypeVar("Result")
Function = TypeVar("Function", bound=Callable[..., Any])


def _private(name: str) -> Any:
    """Return the function of torch with this dotted name; if torch has none, a function that raises an error."""
    found: Any = torch
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is not None:
        return found

    def is_gone(*args: object) -> Any:
        raise FlatParamError(
            f"torch {torch.__version__} has no torch.{name}, which flatparam needs for a backward pass; install a "
            "version that flatparam supports (2.11 to 2.15)"
        )

    return is_gone


_WILL_EXECUTE: Final = _private("_C._will_engine_execute_node")
#: The number of the autograd run that this thread is in; `NO_RUN` outside of one.
current_run: Final[Callable[[], int]] = _private("_C._current_graph_task_id")
NO_RUN: Final = -1
#: Have a function called when the autograd run that this thread is in has computed everything.
call_at_end: Final[Callable[[Callable[[], None]], None]] = _private(
    "autograd.Variable._execution_engine.queue_callback"
)
autocast_is_on: Final[Callable[[], bool]] = _private("_C._is_any_autocast_enabled")
is_traced: Final[Callable[[], bool]] = _private("_C._is_tracing")
#: The references to a tensor from C++.
use_count: Final[Callable[[Tensor], int]] = _private("Tensor._use_count")


@functools.cache
def on_failed_run(tell: Callable[[BaseException], None]) -> None:
    """Have `tell` called with each exception that comes out of a backward pass in this process, from now on.

    torch changes the same two names when it traces backward passes.
    """
    run = getattr(torch.autograd.graph, "_engine_run_backward", None)
    if run is None:
        return

    @functools.wraps(run)
    def telling(*args: Any, **kwargs: Any) -> Any:
        try:
            return run(*args, **kwargs)
        except BaseException as error:
            tell(error)
            raise

    for module in (torch.autograd.graph, torch.autograd):
        module._engine_run_backward = telling  # type: ignore[attr-defined]


def transforms() -> tuple[str, ...]:
    """The transforms of `torch.func` that the caller is inside of, the outermost first: `vmap`, `jvp`, `grad` ..."""
    # Without the name, such a pass fails later, with torch's own error.
    ask = getattr(torch._C._functorch, "get_interpreter_stack", None)
    found = ask() if ask is not None else None
    return tuple(str(each.key()).rpartition(".")[2].lower() for each in found) if found else ()


def in_backward() -> bool:
    """Return whether this thread is inside a backward pass of autograd."""
    return current_run() != NO_RUN


def compiles() -> bool:
    """Return whether something that `torch.compile` has made may run: before it does, Dynamo patches `nn.Module`."""
    guard = sys.modules.get("torch._dynamo.mutation_guard")
    if guard is None:
        return False
    return not hasattr(guard, "install_generation_tagging_init") or not getattr(nn.Module, _NOT_PATCHED, True)


def will_run(node: Node) -> bool:
    """Return whether the backward pass under way is going to compute what arrives at `node`."""
    try:
        return bool(_WILL_EXECUTE(node))
    except FlatParamError:
        raise
    # The leaf is an input of autograd.grad(): its gradient is computed, and its hooks run.
    except RuntimeError:
        return True


def latest(nodes: Mapping[Key, Node]) -> list[Key]:
    """Return the keys of the node that was made last, and of those that accumulate the gradients of leaves.

    Of a device's nodes that are ready, autograd runs the one first that the forward pass made last. So before the
    latest of `nodes` runs, every node of that device that was made after it has run. A node that accumulates a leaf's
    gradient runs as soon as it is ready, and so tells of itself only.

    Args:
        nodes: of one device and of one thread's forward pass.
    """
    try:
        made = {key: node._sequence_nr() for key, node in nodes.items()}
    # This version of torch does not tell.
    except AttributeError:
        return list(nodes)
    last = max((number for number in made.values() if number != _ACCUMULATES), default=None)
    return [key for key, number in made.items() if number in (last, _ACCUMULATES)]


def node_beneath(view: Tensor, before: Iterable[Node]) -> Node | None:
    """The node of the tensor that `view` is a view of, if this thread's forward pass made it after all nodes `before`.

    Leaves among these do not count. `None` if it is older, or if `view` is a view of nothing that autograd records.
    """
    base = view._base
    node = None if base is None else base.grad_fn
    if node is None:
        return None
    try:
        numbers = [each._sequence_nr() for each in before]
        is_later = all(number < node._sequence_nr() for number in numbers if number != _ACCUMULATES)
    # This version of torch does not tell.
    except AttributeError:
        return None
    return node if is_later else None


def accumulation_node(leaf: Tensor) -> Node | None:
    """The node of autograd that accumulates the gradient of `leaf`; `None` for integers, which never get a gradient."""
    if not (leaf.is_floating_point() or leaf.is_complex()):
        return None
    wanted = leaf.requires_grad
    with torch.inference_mode(False), torch.enable_grad():
        node = get_gradient_edge(leaf.requires_grad_(True)).node
    leaf.requires_grad_(wanted)
    return node


#: The number of dispatch modes that are on in this thread.
dispatch_modes: Final[Callable[[], int]] = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)


def stays_last(after: Callable[..., Any]) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """Have a forward pre-hook keep the module's forward hook that is a partial call of `after` behind all others.

    So hooks that are registered later on run before it. The module is the second argument of the pre-hook.
    """

    def decorate(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        @functools.wraps(function)
        def keeping(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            module: Any = args[1]
            hooks = module._forward_hooks
            is_last = not hooks or getattr(next(reversed(hooks.values())), "func", None) is after
            if not is_last:
                own = (key for key, hook in hooks.items() if getattr(hook, "func", None) is after)
                for key in [*own]:
                    hooks.move_to_end(key)
            return function(*args, **kwargs)

        return keeping

    return decorate


def apart_from_checkpoints(function: Callable[..., Result], *args: Any) -> Result:
    """Call `function(*args)` so that selective activation checkpointing neither saves nor looks for what it computes.

    Its dispatch modes count all operations in a region. Those of a gather inside come in one of both passes only, or at
    a time that depends on the other ranks. If no mode is on (`dispatch_modes`), a plain call does the same.
    """
    with _without_modes_of("torch.utils.checkpoint"):
        return function(*args)


@contextlib.contextmanager
def _without_modes_of(module: str) -> Iterator[None]:
    """Turn the dispatch modes off whose class is one of `module`, or derives from one."""
    from torch.utils import _python_dispatch

    modes = _python_dispatch._get_current_dispatch_mode_stack()
    kept = [mode for mode in modes if all(base.__module__ != module for base in type(mode).__mro__)]
    if len(kept) == len(modes):
        yield
        return
    with contextlib.ExitStack() as stack:
        stack.enter_context(_python_dispatch._disable_current_modes())
        for mode in kept:
            stack.enter_context(mode)
        yield


def untraced(function: Function, *, with_callees: bool = True) -> Function:
    """Have `torch.compile` run `function`, a Python function, as it is: it compiles modules, not the code around them.

    `torch.compiler.disable` does the same, but imports Dynamo with this package, and takes some microseconds for each
    call. Here two objects are marked: the code object, which the interpreter's frame hook reads, and the function,
    which Dynamo reads.

    Args:
        with_callees: leave everything that `function` calls as it is, too; otherwise, the callees are compiled.
    """
    try:
        from torch._C._dynamo import eval_frame

        skip, default = eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT
        strategy = eval_frame._FrameExecStrategy(skip, skip if with_callees else default)
        eval_frame.set_code_exec_strategy(function.__code__, strategy)
    # This version of torch lacks these names: use its public function.
    except (ImportError, AttributeError):
        return torch.compiler.disable(function, recursive=with_callees)  # type: ignore[no-any-return, no-untyped-call]
    # torch.compiler.disable sets the same attribute.
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function


@functools.partial(untraced, with_callees=False)
def in_range(name: str, function: Callable[..., Result], *args: Any) -> Result:
    """Call `function(*args)`; a profile shows the call as `FullyShardedDataParallel.<name>`.

    Without a profiler this costs nothing. The names are FSDP1's; `rate_limiter` is where a reduction waits for the one
    before it.
    """
    if not is_profiled():
        return function(*args)
    with torch.profiler.record_function(f"FullyShardedDataParallel.{name}"):
        return function(*args)


def profiled(name: str | Callable[..., str]) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """Call the function in a range; see `in_range`.

    Args:
        name: the name, or a function that returns it, of the arguments; that is not called without a profiler.
    """

    def decorate(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        @functools.wraps(function)
        def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            if not is_profiled():
                return function(*args, **kwargs)
            said = name if isinstance(name, str) else name(*args, **kwargs)
            return in_range(said, functools.partial(function, **kwargs) if kwargs else function, *args)

        return call

    return decorate
