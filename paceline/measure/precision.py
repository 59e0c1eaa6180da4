"""A dtype with its numerics, written as one word: `float32`, `bfloat16`, `bfloat16-strict`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from paceline.errors import InvalidRequest
from paceline.launcher import ClusterOptions

NAMED_DTYPES = ("float32", "bfloat16", "float16")
DTYPES = ("auto", *NAMED_DTYPES)
STRICT = "-strict"


@dataclass(frozen=True)
class Precision:
    dtype: str
    numerics: str = "fast"

    @classmethod
    def parse(cls, word: str, dtypes: Sequence[str] = DTYPES) -> Self:
        """Raises InvalidRequest for anything but these dtypes."""
        dtype = word.removesuffix(STRICT)
        if dtype not in dtypes:
            raise InvalidRequest(
                f"--dtypes has {word!r}; give any of {', '.join(dtypes)}, each with {STRICT} after it or not",
                field="dtypes",
            )
        return cls(dtype, "strict" if word.endswith(STRICT) else "fast")

    def __str__(self) -> str:
        return self.dtype + (STRICT if self.numerics == "strict" else "")


def with_precision(options: ClusterOptions, precision: Precision, policy: str) -> ClusterOptions:
    """Options of a policy in a precision. The paper's policies get their dense layout, which has no strict numerics."""
    dense = policy != "continuous" and precision.numerics == "fast"
    return replace(
        options,
        dtype=precision.dtype,
        numerics=precision.numerics,
        policy=policy,
        layout="dense" if dense else "paged",
    )
