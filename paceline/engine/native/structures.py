"""The arguments of the compiled functions, field by field as their source has them.

`STRUCTURES` says which is which. Their sizes are compared when the library is loaded, their fields by a test.
"""

import ctypes
from collections.abc import Mapping
from types import MappingProxyType

_pointer, _number, _real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class NormCall(ctypes.Structure):
    _fields_ = (
        *((name, _number) for name in ("token_count", "size")),
        *((name, _pointer) for name in ("hidden", "added", "weight", "normed")),
        ("epsilon", _real),
    )


class GateCall(ctypes.Structure):
    _fields_ = (
        *((name, _number) for name in ("token_count", "size")),
        *((name, _pointer) for name in ("gate_and_up", "gated")),
    )


class TakeCall(ctypes.Structure):
    _fields_ = (
        *((name, _number) for name in ("count", "size", "stride")),
        *((name, _pointer) for name in ("places", "values", "taken")),
        *((name, _number) for name in ("from_half", "to_half")),
    )


class AttendedRow(ctypes.Structure):
    _fields_ = tuple((name, _number) for name in ("first", "count", "length", "page_count", "skipped"))


class AttendedRows(ctypes.Structure):
    _fields_ = (
        *((name, _number) for name in ("row_count", "page_tokens", "page_slots")),
        *((name, _pointer) for name in ("rows", "pages", "slots", "scores")),
        ("longest", _number),
    )


class AttendCall(ctypes.Structure):
    _fields_ = (
        ("rows", ctypes.POINTER(AttendedRows)),
        *((name, _number) for name in ("head_count", "kv_head_count", "head_size", "slot_count")),
        *((name, _pointer) for name in ("cosines", "signed_sines", "query_norm", "key_norm")),
        *((name, _pointer) for name in ("keys", "values", "projected", "attended")),
        *((name, _real) for name in ("epsilon", "scaling")),
        ("is_last", _number),
    )


class ProductCall(ctypes.Structure):
    _fields_ = (
        *((name, _number) for name in ("row_count", "size", "column_count")),
        *((name, _pointer) for name in ("way", "rows", "weights", "scales", "bias", "out")),
        ("is_half", _number),
    )


class ChooseCall(ctypes.Structure):
    _fields_ = (
        *((name, _number) for name in ("token_count", "size")),
        *((name, _pointer) for name in ("logits", "seeds", "positions", "temperatures", "chosen")),
    )


class RankCall(ctypes.Structure):
    _fields_ = (("choose", ChooseCall), ("count", _number), ("shares", _pointer))


class RecordedCall(ctypes.Structure):
    _fields_ = (
        *((name, _pointer) for name in ("function", "call")),
        *((name, _number) for name in ("is_half", "which")),
    )


class StepsCall(ctypes.Structure):
    _fields_ = (
        ("calls", _pointer),
        *((name, _number) for name in ("call_count", "token_count", "step_count")),
        ("row_counts", _pointer),
        ("rank", RankCall),
        *((name, _pointer) for name in ("rows", "token_ids", "wanted")),
    )


STRUCTURES: Mapping[str, type[ctypes.Structure]] = MappingProxyType(
    {
        "Norm": NormCall,
        "Gate": GateCall,
        "Take": TakeCall,
        "Row": AttendedRow,
        "Rows": AttendedRows,
        "Attend": AttendCall,
        "Product": ProductCall,
        "Choose": ChooseCall,
        "Rank": RankCall,
        "Recorded": RecordedCall,
        "Steps": StepsCall,
    }
)
"""By their names in the library."""


def check_sizes(library: ctypes.CDLL) -> None:
    """Raise AttributeError when a structure has another size in the library, which would read and write elsewhere."""
    library.paceline_structure_bytes.argtypes = (ctypes.c_char_p,)
    library.paceline_structure_bytes.restype = ctypes.c_int64
    for name, own in STRUCTURES.items():
        found = library.paceline_structure_bytes(name.encode())
        if found != ctypes.sizeof(own):
            raise AttributeError(
                f"the library's {name} has {found} bytes, and {own.__name__} of structures.py {ctypes.sizeof(own)}"
            )
