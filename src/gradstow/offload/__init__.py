"""Values that wait for the backward somewhere else: files, slots in them, and the operators that go there and back."""

from gradstow.offload._ops import arrived, fetch, send, sent
from gradstow.offload._place import check_place, parse_place
from gradstow.offload._store import Store, store_in

__all__ = ["Store", "arrived", "check_place", "fetch", "parse_place", "send", "sent", "store_in"]
