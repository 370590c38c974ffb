"""torch → StepGraph. With ``execute`` the only room that may use private torch APIs."""

from gradstow.capture._backend import (
    aot,
    aten_names,
    boxed,
    call_module,
    changed_inputs,
    compile_settings,
    fresh_function,
)
from gradstow.capture._capture import (
    Captured,
    RehearsalFailed,
    Seen,
    Step,
    capture,
    captured_from,
    check_loss,
    device_of,
    existing_gradients,
    find_loss,
    first_line,
    graph_breaks,
    resident_bytes,
    see,
    weights_signature,
)
from gradstow.capture._inplace import overwriting_call
from gradstow.capture._log import CompiledGraph, StepLog
from gradstow.capture._normalize import copy_graph, is_tangent, normalize
from gradstow.capture._region import InputRole, JointGraph, build_region, fingerprint
from gradstow.capture._rehearse import compiled_nodes, storage_key
from gradstow.capture._rerun import OutputRef, rerun_call
from gradstow.capture._tree import batch_signature, tensors

__all__ = [
    "Captured",
    "CompiledGraph",
    "InputRole",
    "JointGraph",
    "OutputRef",
    "RehearsalFailed",
    "Seen",
    "Step",
    "StepLog",
    "aot",
    "aten_names",
    "batch_signature",
    "boxed",
    "build_region",
    "call_module",
    "capture",
    "captured_from",
    "changed_inputs",
    "check_loss",
    "compile_settings",
    "compiled_nodes",
    "copy_graph",
    "device_of",
    "existing_gradients",
    "find_loss",
    "fingerprint",
    "first_line",
    "fresh_function",
    "graph_breaks",
    "is_tangent",
    "normalize",
    "overwriting_call",
    "rerun_call",
    "resident_bytes",
    "see",
    "storage_key",
    "tensors",
    "weights_signature",
]
