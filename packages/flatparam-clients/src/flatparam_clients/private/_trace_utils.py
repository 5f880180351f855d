"""FSDP1's module of tracing: its names."""

from flatparam_clients.tracing import ForwardTracer as _ExecOrderTracer
from flatparam_clients.tracing import ParameterUse as _ParamUsageInfo
from flatparam_clients.tracing import TracedForward as _ExecutionInfo
from flatparam_clients.tracing import TracingConfig

__all__ = ["TracingConfig", "_ExecOrderTracer", "_ExecutionInfo", "_ParamUsageInfo"]
