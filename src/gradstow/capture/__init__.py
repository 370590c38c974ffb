"""torch → StepGraph. With ``execute`` the only room that may use private torch APIs."""

from gradstow.capture._backend import aot, boxed, call_module, compile_settings, fresh_function
from gradstow.capture._capture import (
    Step,
    batch_signature,
    capture,
    check_loss,
    device_of,
    find_loss,
    resident_bytes,
)
from gradstow.capture._inplace import overwriting_call
from gradstow.capture._normalize import copy_graph, is_tangent, normalize
from gradstow.capture._region import InputRole, JointGraph, build_region, fingerprint
from gradstow.capture._rehearse import compiled_nodes, let_gradients_be_absent, storage_key
from gradstow.capture._rerun import OutputRef, rerun_call

__all__ = [
    "InputRole",
    "JointGraph",
    "OutputRef",
    "Step",
    "aot",
    "batch_signature",
    "boxed",
    "build_region",
    "call_module",
    "capture",
    "check_loss",
    "compile_settings",
    "compiled_nodes",
    "copy_graph",
    "device_of",
    "find_loss",
    "fingerprint",
    "fresh_function",
    "is_tangent",
    "let_gradients_be_absent",
    "normalize",
    "overwriting_call",
    "rerun_call",
    "resident_bytes",
    "storage_key",
]
