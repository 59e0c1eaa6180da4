"""The promise of a target's numerics, in words. `engine.numerics` decides which promise holds."""

from paceline.types import ModelDescription


def promise(target: ModelDescription) -> str:
    """Return the promise for the outputs of the described target."""
    return f"{target.numerics} in {target.precision}: {_outputs(target)}"


def _outputs(target: ModelDescription) -> str:
    if target.numerics == "strict":
        return "speculative output equals plain decoding, bit for bit"
    if target.dtype == "float32" and not target.rounds_rows:
        weights = f" with the {target.quantization} weights" if target.quantization else ""
        return f"output equals Hugging Face greedy decoding{weights}, token for token"
    return "rounding decides between close logits, so speculative output may differ from plain decoding"
