"""Weights of callers, as they are written in a setting."""

import pytest

from paceline.scope import parse_weights


def test_weights_are_read_with_their_names() -> None:
    assert parse_weights("") == {}
    assert parse_weights("batch=0.5, chat=3,spiffe://a=b=2") == {"batch": 0.5, "chat": 3.0, "spiffe://a=b": 2.0}


@pytest.mark.parametrize(
    "setting", ["batch", "=1", "batch=", "batch=much", "batch=0", "batch=-1", "batch=nan", "a=1e9"]
)
def test_what_is_no_weight_is_refused_with_the_form(setting: str) -> None:
    with pytest.raises(ValueError, match="give NAME=WEIGHT"):
        parse_weights(setting)
