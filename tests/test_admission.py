"""Requests that can never be served are refused before anything is queued."""

import pytest

from coordinator.admission import Admission
from paceline.errors import PacelineError
from paceline.types import (
    GenerationRequest,
    SamplingParameters,
    TokenIds,
)
from tests.coordinators import SERVED
from tests.fakes import VOCABULARY_SIZE


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (GenerationRequest(TokenIds(())), "prompt"),
        (GenerationRequest(TokenIds((5,) * 1000)), "prompt"),
        (GenerationRequest(TokenIds((VOCABULARY_SIZE,))), "prompt.token_ids"),
        (GenerationRequest(TokenIds((5,)), max_new_tokens=0), "max_new_tokens"),
        (GenerationRequest(TokenIds((5,)), max_new_tokens=-3), "max_new_tokens"),
        (GenerationRequest(TokenIds((5,)), max_new_tokens=2**31 - 1), "max_new_tokens"),
        (GenerationRequest(TokenIds((5,)), stop_token_ids=(-1,)), "stop_token_ids"),
        (GenerationRequest(TokenIds((5,)), stop_token_ids=(5,) * 1025), "stop_token_ids"),
        (
            GenerationRequest(
                TokenIds((5,)),
                sampling=SamplingParameters(min_new_tokens=2),
                stop_token_ids=tuple(range(VOCABULARY_SIZE)),
            ),
            "sampling.min_new_tokens",
        ),
        (GenerationRequest(TokenIds((5,)), max_draft_count=-1), "max_draft_count"),
        (GenerationRequest(TokenIds((5,)), stop_strings=("",)), "stop_strings"),
        (GenerationRequest(TokenIds((5,)), stop_strings=("x",) * 17), "stop_strings"),
    ],
)
def test_a_bad_request_is_refused_by_field(request_: GenerationRequest, field: str) -> None:
    with pytest.raises(PacelineError) as refusal:
        Admission(SERVED, default_max_new_tokens=40).admit(request_)
    assert getattr(refusal.value, "field", None) == field
