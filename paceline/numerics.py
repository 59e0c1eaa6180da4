"""What a target's numerics promise, in words. Knows the promise only; `engine.numerics` decides which one holds."""

from paceline.types import ModelDescription


def promise(target: ModelDescription) -> str:
    """Say what holds for the outputs of a target that describes itself so."""
    said = f"{target.numerics} in {target.dtype}: {_outputs(target)}"
    if target.device.startswith("cuda"):
        return f"{said}; no GPU has been seen yet, so this is untried there"
    return said


def _outputs(target: ModelDescription) -> str:
    if target.numerics == "strict":
        return "speculative output equals plain decoding, bit for bit"
    if target.dtype == "float32":
        return "output equals Hugging Face greedy decoding, token for token"
    return "rounding decides between close logits, so speculative output may differ from plain decoding"
