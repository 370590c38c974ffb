"""torch → StepGraph. With ``execute`` the only room that may use private torch APIs."""

from gradstow.capture._backend import (
    aot,
    aten_names,
    boxed,
    call_module,
    compile_settings,
    fresh_function,
    on_real_tensors,
)
from gradstow.capture._breaks import is_whole_call, listen
from gradstow.capture._capture import (
    RehearsalFailed,
    capture,
    captured_from,
    first_line,
    see,
    was_told,
)
from gradstow.capture._captured import Captured, Seen, nothing_captured
from gradstow.capture._compiled import joint_passes
from gradstow.capture._cuda_history import cuda_history
from gradstow.capture._cut import cut
from gradstow.capture._fakes import Fakes, same_randomness
from gradstow.capture._fuse import Kernel, expand
from gradstow.capture._inplace import overwriting_call
from gradstow.capture._log import CompiledGraph, StepLog
from gradstow.capture._loss import check_loss, find_loss
from gradstow.capture._model import (
    applied_gradients,
    device_of,
    existing_gradients,
    resident_bytes,
    resident_items,
    stand_in,
    weights_signature,
)
from gradstow.capture._normalize import copy_graph, is_tangent, normalize
from gradstow.capture._optimizer import state_bytes
from gradstow.capture._parts import expose_parts, hide_parts, is_part
from gradstow.capture._region import InputRole, JointGraph, build_region, fingerprint
from gradstow.capture._rehearse import compiled_nodes
from gradstow.capture._rerun import OutputRef, rerun_call
from gradstow.capture._step import Step
from gradstow.capture._strides import Strides, arrived_strides, expected_strides, keep_layouts, restrided
from gradstow.capture._tree import batch_signature, storage_key, tensors
from gradstow.capture._uses import changed_inputs

__all__ = [
    "Captured",
    "CompiledGraph",
    "Fakes",
    "InputRole",
    "JointGraph",
    "Kernel",
    "OutputRef",
    "RehearsalFailed",
    "Seen",
    "Step",
    "StepLog",
    "Strides",
    "aot",
    "applied_gradients",
    "arrived_strides",
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
    "cuda_history",
    "cut",
    "device_of",
    "existing_gradients",
    "expand",
    "expected_strides",
    "expose_parts",
    "find_loss",
    "fingerprint",
    "first_line",
    "fresh_function",
    "hide_parts",
    "is_part",
    "is_tangent",
    "is_whole_call",
    "joint_passes",
    "keep_layouts",
    "listen",
    "normalize",
    "nothing_captured",
    "on_real_tensors",
    "overwriting_call",
    "rerun_call",
    "resident_bytes",
    "resident_items",
    "restrided",
    "same_randomness",
    "see",
    "stand_in",
    "state_bytes",
    "storage_key",
    "tensors",
    "was_told",
    "weights_signature",
]
