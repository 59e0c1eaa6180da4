"""A dtype with its numerics, written as one word: `float32`, `bfloat16` as it is served, `bfloat16-fast`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from paceline.errors import InvalidRequest
from paceline.process.cluster_plan import ClusterOptions
from paceline.process.variables import NO_HEADS
from paceline.types import PAPER_POLICIES

HALF_DTYPES = ("bfloat16", "float16")
NAMED_DTYPES = ("float32", *HALF_DTYPES)
DTYPES = ("auto", *NAMED_DTYPES)
NUMERICS = ("fast", "strict")
"""Numerics that may be asked for by name; without a name they are `auto`, the services' default."""
AS_SERVED = (
    "strict in half precision, as by default, and fast there under the paper's policies, whose layout not every "
    "machine runs strictly. "
    "Each also with -fast or -strict after it."
)


@dataclass(frozen=True)
class Precision:
    dtype: str
    numerics: str = "auto"

    @classmethod
    def parse(cls, word: str, dtypes: Sequence[str] = DTYPES) -> Self:
        """Parse a word. Raise InvalidRequest for anything but these dtypes."""
        dtype, _, numerics = word.partition("-")
        if dtype not in dtypes or word != dtype and numerics not in NUMERICS:
            raise InvalidRequest(
                f"--dtypes has {word!r}; give any of {', '.join(dtypes)}, each with -fast or -strict after it or not",
                field="dtypes",
            )
        return cls(dtype, numerics or "auto")

    def __str__(self) -> str:
        return self.dtype if self.numerics == "auto" else f"{self.dtype}-{self.numerics}"

    def is_strict(self, quantization: str) -> bool:
        """Return whether numerics of a target with this quantisation are strict; meaningful for a named dtype only."""
        is_rounded = self.dtype in HALF_DTYPES or quantization == "w8a8"
        return self.numerics == "strict" or (self.numerics == "auto" and is_rounded)

    def under(self, policy: str, quantization: str = "none") -> Self:
        """Return the precision under a policy: `auto` that were strict is fast under the paper's, which are dense."""
        becomes_fast = _is_dense(policy, self) and self.is_strict(quantization)
        return replace(self, numerics="fast") if becomes_fast else self


def with_precision(
    options: ClusterOptions, precision: Precision, policy: str, quantization: str = "none"
) -> ClusterOptions:
    """Set a policy and a precision. The paper's policies get their dense layout unless strict is asked for.

    `quantization` is what the target has by its own settings.
    Nothing but a draft service drafts under them.
    """
    return replace(
        options,
        dtype=precision.dtype,
        numerics=precision.under(policy, quantization).numerics,
        policy=policy,
        layout="dense" if _is_dense(policy, precision) else "paged",
        heads=NO_HEADS if policy in PAPER_POLICIES else options.heads,
    )


def _is_dense(policy: str, precision: Precision) -> bool:
    # Not every machine runs the dense layout strictly.
    return policy in PAPER_POLICIES and precision.numerics != "strict"
