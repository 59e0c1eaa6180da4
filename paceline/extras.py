"""Optional libraries and the extras that install them."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from paceline.errors import StartupError

_EXTRAS = {
    **dict.fromkeys(("torch", "transformers", "safetensors", "huggingface_hub", "psutil"), "engine"),
    "matplotlib": "bench",
    "sentencepiece": "convert",
    "llama_cpp": "llama-cpp",
}


@contextmanager
def named_extras() -> Iterator[None]:
    """Raise StartupError, naming the extra to install, when the block lacks an optional library."""
    try:
        yield
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        if library not in _EXTRAS:
            raise
        raise StartupError(
            f"this needs {library}, which is not installed: pip install 'paceline[{_EXTRAS[library]}]'"
        ) from error


def check_engine() -> None:
    """Raise StartupError, naming the extra to install, when a model service could not start."""
    with named_extras():
        for library, extra in _EXTRAS.items():
            if extra == "engine" and find_spec(library) is None:
                raise ModuleNotFoundError(f"No module named {library!r}", name=library)
