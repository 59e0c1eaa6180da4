"""The cost of prompts with and without drafts: seconds beyond a usual round, over the tokens yielded."""

import pytest
from coordinator.rounds.prompt_times import PromptTimes


def learned(drafted_s: float, plain_s: float, plain_rounds: int) -> PromptTimes:
    """Learn from rounds of 2 tokens a row, or 1; every tenth takes these seconds for a prompt of 100 tokens a row."""
    prompts = PromptTimes()
    for drafted, beyond_s, rounds in ((True, drafted_s, 4000), (False, plain_s, plain_rounds)):
        for number in range(rounds):
            brings = number % 10 == 0
            prompts.add(drafted=drafted, beyond_s=beyond_s * brings, prompt_tokens=100.0 * brings, tokens=1.0 + drafted)
    return prompts


def test_rounds_that_draft_pay_for_prompts_twice_and_others_once() -> None:
    prompts = learned(drafted_s=0.3, plain_s=0.2, plain_rounds=4000)
    assert prompts.token_s(drafted=True) == pytest.approx(1.5 * prompts.token_s(drafted=False), rel=0.05)


def test_what_was_seen_of_one_way_is_taken_for_both_until_the_other_is_known() -> None:
    prompts = learned(drafted_s=0.3, plain_s=0.0, plain_rounds=0)
    assert prompts.token_s(drafted=False) == pytest.approx(prompts.token_s(drafted=True))
    assert prompts.token_s(drafted=True) == pytest.approx(0.3 / 20, rel=0.05)


def test_what_a_draft_makes_up_for_later_is_counted_though_no_prompt_comes_with_it() -> None:
    prompts = learned(drafted_s=0.3, plain_s=0.2, plain_rounds=100)
    before = prompts.token_s(drafted=True)
    prompts.add(drafted=True, beyond_s=1.0, prompt_tokens=0.0, tokens=2.0)
    assert prompts.token_s(drafted=True) > before


def test_without_prompts_nothing_is_added() -> None:
    prompts = PromptTimes()
    assert prompts.token_s(drafted=True) == 0
    prompts.add(drafted=True, beyond_s=0.0, prompt_tokens=0.0, tokens=2.0)
    assert prompts.token_s(drafted=True) == 0
