"""torch → StepGraph. With ``execute`` the only room that may use private torch APIs."""

from gradstow.capture._backend import aot, aten_names, boxed, call_module, compile_settings, fresh_function
from gradstow.capture._capture import (
    RehearsalFailed,
    Seen,
    Step,
    capture,
    check_loss,
    device_of,
    find_loss,
    first_line,
    graph_breaks,
    recorded_graph,
    resident_bytes,
    see,
    was_told,
    weights_signature,
)
from gradstow.capture._fakes import same_randomness
from gradstow.capture._inplace import overwriting_call
from gradstow.capture._log import CompiledGraph, StepLog
from gradstow.capture._normalize import copy_graph, is_tangent, normalize
from gradstow.capture._region import InputRole, JointGraph, build_region, fingerprint
from gradstow.capture._rehearse import compiled_nodes, storage_key
from gradstow.capture._rerun import OutputRef, rerun_call
from gradstow.capture._strides import Strides, arrived_strides, expected_strides, keep_layouts, restrided
from gradstow.capture._tree import batch_signature, tensors
from gradstow.capture._uses import one_input_per_use

__all__ = [
    "CompiledGraph",
    "InputRole",
    "JointGraph",
    "OutputRef",
    "RehearsalFailed",
    "Seen",
    "Step",
    "StepLog",
    "Strides",
    "aot",
    "arrived_strides",
    "aten_names",
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
    "expected_strides",
    "find_loss",
    "fingerprint",
    "first_line",
    "fresh_function",
    "graph_breaks",
    "is_tangent",
    "keep_layouts",
    "normalize",
    "one_input_per_use",
    "overwriting_call",
    "recorded_graph",
    "rerun_call",
    "resident_bytes",
    "restrided",
    "same_randomness",
    "see",
    "storage_key",
    "tensors",
    "was_told",
    "weights_signature",
]
