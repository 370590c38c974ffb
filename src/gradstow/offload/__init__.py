"""Values that wait for the backward somewhere else: files, slots in them, and the operators that go there and back."""

from gradstow.offload._bandwidth import bandwidth_of, transfer_costs
from gradstow.offload._ops import arrived, fetch, send, sent
from gradstow.offload._place import check_place, parse_place
from gradstow.offload._store import store_in

__all__ = [
    "arrived",
    "bandwidth_of",
    "check_place",
    "fetch",
    "parse_place",
    "send",
    "sent",
    "store_in",
    "transfer_costs",
]
