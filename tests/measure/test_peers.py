"""Hugging Face's decoding methods as peers: their outputs equal the reference's, and they can be stopped."""

import asyncio
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from paceline.measure.peers.hugging_face import HuggingFacePeer, assistance, prompt_lookup
from paceline.measure.peers.local import LocalSystem
from paceline.measure.peers.reference import HuggingFaceReference
from paceline.measure.peers.reference_outputs import identity_of
from paceline.model_service.worker import ModelWorker
from tests.checkpoints import END_TOKEN_ID, VOCABULARY_SIZE, edit_json, write_model
from tests.conftest import PairOfCheckpoints

LIMIT = 24
Options = Callable[[HuggingFaceReference], dict[str, Any]]


def prompts() -> list[tuple[int, ...]]:
    rng = random.Random(11)
    return [tuple(rng.randrange(8, VOCABULARY_SIZE) for _ in range(length)) for length in (3, 17, 40, 8, 5)]


@pytest.mark.parametrize(
    ("batch_size", "options"),
    [
        (1, lambda draft: {}),
        (2, lambda draft: {}),
        (8, lambda draft: {}),
        (1, lambda draft: assistance(draft)),
        (1, lambda draft: assistance(draft, 3)),
        (1, lambda draft: prompt_lookup()),
    ],
)
def test_peers_answer_as_generate_does_at_batch_one(
    batch_size: int, options: Options, pairs: dict[str, PairOfCheckpoints]
) -> None:
    target = HuggingFaceReference(str(pairs["Llama"].target), "float32")
    draft = HuggingFaceReference(str(pairs["Llama"].draft), "float32")
    expected = [target.generate(prompt, LIMIT) for prompt in prompts()]
    outputs = HuggingFacePeer(target, LIMIT, batch_size, options(draft)).answer(prompts(), Event())
    assert outputs == expected
    assert any(len(output) < LIMIT for output in expected)
    assert all(END_TOKEN_ID not in output[:-1] for output in outputs)


def test_the_yardstick_leaves_out_penalties_that_no_request_asked_for(tmp_path: Path) -> None:
    """Qwen2.5's generation_config.json penalises repetition: `generate` obeys, and every comparison failed."""
    write_model(tmp_path, "Qwen2")
    plain = HuggingFaceReference(str(tmp_path), "float32")
    expected = [plain.generate(prompt, LIMIT) for prompt in prompts()]
    of_checkpoint = {"do_sample": True, "temperature": 0.7, "repetition_penalty": 1.5, "no_repeat_ngram_size": 2}
    edit_json(tmp_path / "generation_config.json", **of_checkpoint)
    again = HuggingFaceReference(str(tmp_path), "float32")
    assert [again.generate(prompt, LIMIT) for prompt in prompts()] == expected


def test_prompts_are_padded_with_no_end_token_that_the_model_lacks(tmp_path: Path) -> None:
    """With -1 among the end tokens a batch of prompts of different lengths was an IndexError."""
    write_model(tmp_path, "Llama", eos_token_id=[-1, END_TOKEN_ID, VOCABULARY_SIZE])
    target = HuggingFaceReference(str(tmp_path), "float32")
    expected = [target.generate(prompt, LIMIT) for prompt in prompts()]
    assert target.generate_batch(prompts(), LIMIT) == expected


def test_kept_outputs_are_not_those_of_another_configuration(tmp_path: Path) -> None:
    """The same weights under other positions, or with other end tokens, got the outputs of before."""
    write_model(tmp_path, "Qwen2")
    identities = [identity_of(str(tmp_path), "float32", "cpu", "none")]
    for name, changes in (
        ("config.json", {"rms_norm_eps": 0.01}),
        ("generation_config.json", {"eos_token_id": [7, 99]}),
    ):
        edit_json(tmp_path / name, **changes)
        identities.append(identity_of(str(tmp_path), "float32", "cpu", "none"))
    assert len(set(identities)) == 3


def test_a_peer_that_is_told_to_stop_ends_at_its_next_token(pairs: dict[str, PairOfCheckpoints]) -> None:
    target = HuggingFaceReference(str(pairs["Llama"].target), "float32")
    stop = Event()
    stop.set()
    outputs = HuggingFacePeer(target, LIMIT, 2).answer(prompts(), stop)
    assert [len(output) for output in outputs] == [1] * len(prompts())


async def test_a_cancelled_pass_tells_its_peer_to_stop() -> None:
    began, stopped = Event(), Event()

    class Patient:
        threads = 1

        def answer(self, prompts: Sequence[Sequence[int]], stop: Event) -> list[list[int]]:
            began.set()
            stop.wait()
            stopped.set()
            return []

    worker = ModelWorker(1)
    task = asyncio.create_task(LocalSystem(worker, Patient()).run([(1,)]))
    await asyncio.to_thread(began.wait)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.to_thread(worker.close)
    assert stopped.is_set()


def test_the_logit_gap_is_positive_for_the_target_s_own_choice(pairs: dict[str, PairOfCheckpoints]) -> None:
    target = HuggingFaceReference(str(pairs["Llama"].target), "float32")
    prompt = prompts()[0]
    chosen = target.generate(prompt, 1)[0]
    other = (chosen + 1) % VOCABULARY_SIZE
    assert target.logit_gap(prompt, chosen, other) > 0
    assert target.logit_gap(prompt, chosen, other) == -target.logit_gap(prompt, other, chosen)
