"""llama.cpp as a peer, through llama-cpp-python (the extra `llama-cpp`): batch 1, greedy, weights from a GGUF file."""

from collections.abc import Sequence
from pathlib import Path
from threading import Event
from typing import Any

from paceline.errors import InvalidRequest
from paceline.extras import named_extras
from paceline.process.cluster_plan import CORES


def check_llama_cpp(gguf: Path | None) -> None:
    """Raise StartupError unless the extra is installed, and InvalidRequest unless the file is there."""
    _library()
    if gguf is None:
        raise InvalidRequest("--systems has llama.cpp, which reads GGUF files: give --gguf FILE", field="gguf")
    if not gguf.is_file():
        raise InvalidRequest(f"--gguf {gguf} is not a file; convert the target's checkpoint first", field="gguf")


def _library() -> Any:
    with named_extras():
        import llama_cpp
    return llama_cpp


class LlamaCppPeer:
    def __init__(self, gguf: Path, max_new_tokens: int, max_length: int) -> None:
        """`max_length` counts prompt and output of the longest sequence."""
        self.threads = CORES
        self._max_new_tokens = max_new_tokens
        self._model: Any = _library().Llama(
            str(gguf), n_ctx=max_length, n_batch=max_length, n_threads=CORES, n_threads_batch=CORES, verbose=False
        )

    def answer(self, prompts: Sequence[Sequence[int]], stop: Event) -> list[list[int]]:
        _library().llama_set_n_threads(self._model.ctx, self.threads, self.threads)
        return [self._answer(prompt, stop) for prompt in prompts]

    def _answer(self, prompt: Sequence[int], stop: Event) -> list[int]:
        output: list[int] = []
        self._model.reset()  # otherwise a prefix shared with the prompt before would not be computed
        for token in self._model.generate(list(prompt), temp=0.0, repeat_penalty=1.0):
            output.append(token)
            if token == self._model.token_eos() or len(output) == self._max_new_tokens or stop.is_set():
                break
        return output
