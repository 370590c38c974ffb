"""Values that wait for the backward somewhere else: files, slots in them, and the operators that go there and back."""

from gradstow.offload._ops import arrived, fetch, place_of, send, sent
from gradstow.offload._place import check_place, parse_place
from gradstow.offload._sparse import decode_sparse, encode_sparse, sparse_nbytes, spill_sparse
from gradstow.offload._store import Store, store_in
from gradstow.offload._transfer import Place

__all__ = [
    "Place",
    "Store",
    "arrived",
    "check_place",
    "decode_sparse",
    "encode_sparse",
    "fetch",
    "parse_place",
    "place_of",
    "send",
    "sent",
    "sparse_nbytes",
    "spill_sparse",
    "store_in",
]
