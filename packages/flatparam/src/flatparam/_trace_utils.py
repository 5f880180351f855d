"""FSDP1's module of tracing: its names."""

from flatparam.observing.tracing import ForwardTracer as _ExecOrderTracer
from flatparam.observing.tracing import ParameterUse as _ParamUsageInfo
from flatparam.observing.tracing import TracedForward as _ExecutionInfo
from flatparam.observing.tracing import TracingConfig

__all__ = ["TracingConfig", "_ExecOrderTracer", "_ExecutionInfo", "_ParamUsageInfo"]
