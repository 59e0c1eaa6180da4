"""A plan as settings that services read: a file of environment variables.

It knows the services' variables by name; a test compares them with the services' settings.
"""

import shlex
from pathlib import Path

from paceline.errors import InvalidRequest
from paceline.files import replace_file
from paceline.planning.memory import rounded_mib
from paceline.planning.search import Candidate, Need
from paceline.process.variables import NO_DRAFT


def variables(chosen: Candidate, target_model: str, draft_model: str, heads: str) -> dict[str, str]:
    """Return the variables of the services that make them as planned."""
    setting = chosen.setting
    found = {"PACELINE_TARGET_MODEL": target_model, "PACELINE_TARGET_HEADS": heads}
    found |= _of_model("TARGET", chosen.target, chosen, is_int8=setting.int8 == "both")
    found |= {"PACELINE_DRAFT_MODEL": draft_model if chosen.draft else NO_DRAFT}
    if chosen.draft:
        found |= _of_model("DRAFT", chosen.draft, chosen, is_int8=setting.int8 != "none")
    return found | {
        "PACELINE_COORDINATOR_BATCH_SIZE": str(setting.row_count),
        "PACELINE_COORDINATOR_DRAFT_COUNT": str(setting.draft_count),
        "PACELINE_COORDINATOR_LANES": "1",
    }


def _of_model(service: str, need: Need, chosen: Candidate, *, is_int8: bool) -> dict[str, str]:
    own = {
        "MEMORY": f"{rounded_mib(need.total)}MiB",
        "MAX_ROWS": str(chosen.setting.row_count),
        "PREFILL_CHUNK_TOKENS": str(chosen.setting.chunk_tokens),
        "QUANTIZATION": "int8" if is_int8 else "none",
    }
    return {f"PACELINE_{service}_{name}": value for name, value in own.items()}


def write_variables(path: Path, found: dict[str, str], words: str) -> None:
    """Write lines that a shell and `docker --env-file` read. Raise InvalidRequest where they cannot be written.

    A shell takes quotes off and docker does not, so there is no line for a value that needs them.
    """
    if odd := [value for value in found.values() if shlex.quote(value) != value]:
        raise InvalidRequest(
            f"{odd[0]!r} cannot stand in {path}, which a shell and docker read in two ways; give the model by a path "
            "without spaces and signs of the shell's",
            field="output",
        )
    lines = [f"# {words}", *(f"{name}={value}" for name, value in found.items())]
    replace_file(path, "\n".join(lines) + "\n")
