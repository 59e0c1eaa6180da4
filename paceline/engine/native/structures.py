"""The arguments of the functions in `kernels.cpp`, field by field as they are there."""

import ctypes

_pointer, _number, _real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class NormCall(ctypes.Structure):
    """`Norm`."""

    _fields_ = (
        *((name, _number) for name in ("token_count", "size")),
        *((name, _pointer) for name in ("hidden", "added", "weight", "normed")),
        ("epsilon", _real),
    )


class GateCall(ctypes.Structure):
    """`Gate`."""

    _fields_ = (
        *((name, _number) for name in ("token_count", "size")),
        *((name, _pointer) for name in ("gate_and_up", "gated")),
    )


class TakeCall(ctypes.Structure):
    """`Take`."""

    _fields_ = (
        *((name, _number) for name in ("count", "size")),
        *((name, _pointer) for name in ("places", "values", "taken")),
        *((name, _number) for name in ("from_half", "to_half")),
    )


class AttendedRows(ctypes.Structure):
    """`Rows`."""

    _fields_ = (
        *((name, _number) for name in ("row_count", "page_tokens", "page_slots")),
        *((name, _pointer) for name in ("rows", "pages", "slots", "scores")),
        ("longest", _number),
    )


class AttendCall(ctypes.Structure):
    """`Attend`."""

    _fields_ = (
        ("rows", ctypes.POINTER(AttendedRows)),
        *((name, _number) for name in ("head_count", "kv_head_count", "head_size", "slot_count")),
        *((name, _pointer) for name in ("cosines", "signed_sines", "query_norm", "key_norm")),
        *((name, _pointer) for name in ("keys", "values", "projected", "attended")),
        *((name, _real) for name in ("epsilon", "scaling")),
    )


class ProductCall(ctypes.Structure):
    """`Product`, in `products.h`."""

    _fields_ = (
        *((name, _number) for name in ("row_count", "size", "column_count")),
        *((name, _pointer) for name in ("way", "rows", "weights", "scales", "bias", "out")),
        ("is_half", _number),
    )


class ChooseCall(ctypes.Structure):
    """`Choose`."""

    _fields_ = (
        *((name, _number) for name in ("token_count", "size")),
        *((name, _pointer) for name in ("logits", "seeds", "positions", "temperatures", "chosen")),
    )


class RankCall(ctypes.Structure):
    """`Rank`."""

    _fields_ = (("choose", ChooseCall), ("count", _number), ("shares", _pointer))


class StepCall(ctypes.Structure):
    """`Step`."""

    _fields_ = (
        ("choose", ChooseCall),
        *((name, _pointer) for name in ("rows", "token_ids", "positions")),
    )


class RecordedCall(ctypes.Structure):
    """`Recorded`."""

    _fields_ = (
        *((name, _pointer) for name in ("function", "call")),
        *((name, _number) for name in ("is_half", "which")),
    )
