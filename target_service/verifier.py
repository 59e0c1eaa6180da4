"""The verifier, which checks the draft tokens of a group in one packed pass.

At every position the target has one choice. Draft tokens are accepted while they equal it; then the target's choice is
the next token. With no draft tokens this is prefill and plain decoding. The speculative rule is that of Leviathan et
al. (arXiv 2211.17192) for greedy decoding, which keeps the target's output for any draft.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import isnan

from torch import Tensor

from paceline.checks import MAX_DRAFT_COUNT, MAX_FURTHER_COUNT, check_row, check_token_ids, check_top_logprob_count
from paceline.engine.calls import Call
from paceline.engine.heads.drafting import HeadsRow
from paceline.engine.memory import is_out_of_memory
from paceline.engine.placing import PackedRow
from paceline.engine.rules import rule_of
from paceline.engine.runner import Outcome, Runner, ScoredPart
from paceline.engine.sampling import Choice, Choosing, no_choice, token_logprobs
from paceline.engine.threads import at_most
from paceline.errors import CacheFull, InvalidRequest, NoChoice, Overloaded, PacelineError
from paceline.scope import Caller
from paceline.types import Prefilled, TokenLogprobs, Verdict, VerifyOutcome, VerifyRow

LONG_PROMPT = 64
"""Tokens of prompts in a call from which it may use all cores: it takes many times as long as the draft has to do."""


class Verifier:
    def __init__(self, runner: Runner, threads_beside_draft: int | None = None) -> None:
        """`threads_beside_draft` limits the threads of calls with drafts, or of all if results depend on threads.

        Calls with long prompts are limited only in the latter case.
        """
        self.runner = runner
        self._threads_beside_draft = threads_beside_draft

    def verify_calls(self, calls: Sequence[Call[VerifyRow]]) -> list[list[VerifyOutcome | PacelineError]]:
        """Return for each call its rows' verdicts, prefilled lengths or errors, in the order of its rows.

        Rejected draft tokens leave the cache by a change of length; full acceptance of k drafts yields k + 1 tokens.
        Calls of one pass must not share sequences.
        """
        rows = [row for call in calls for row in call.rows]
        is_beside_draft = self.runner.depends_on_threads or _leaves_cores_to_draft(rows)
        with at_most(self._threads_beside_draft if is_beside_draft else None):
            ruled = self.runner.ruled(calls, self._check)
            rows = ruled.rows
            if len(calls) > 1:  # a caller who asks for one round does not wait for others' further ones
                rows = [replace(row, further_count=0) if row.further_count else row for row in rows]
            return ruled.results(self._rounds(rows))

    def verify(self, rows: Sequence[VerifyRow], scope: str = "") -> list[VerifyOutcome | PacelineError]:
        """Return the results of a single call."""
        return self.verify_calls([Call(rows, Caller(scope=scope))])[0]

    def _rounds(self, rows: Sequence[VerifyRow]) -> list[VerifyOutcome | PacelineError]:
        """Run a round of rows, then further ones with those that ask for them.

        A row whose further round fails has none: its caller meets the error in the next round.
        """
        parts = self.runner.parts([self._packed(row).logit_count for row in rows])
        results = [result for part in parts for result in self._settled(rows[part])]
        asked = {index: row for index, row in enumerate(map(self._further_row, rows, results)) if row}
        for (index, row), made in zip(asked.items(), self._further([*asked.values()]), strict=True):
            first = results[index]
            if isinstance(first, Verdict) and isinstance(made, Verdict):
                results[index] = replace(first, further=(replace(made, further=()), *made.further))
            elif isinstance(made, CacheFull) and made.gave_cache_up:
                self.runner.room.tell_again(row.sequence_id, made.missing_bytes)
        return results

    def _further(self, rows: Sequence[VerifyRow]) -> Sequence[VerifyOutcome | PacelineError]:
        """Run rounds that nobody has asked for by themselves: no memory for one is no failure of what came before."""
        try:
            return self._rounds(rows) if rows else []
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return [Overloaded("no memory is left for a further round")] * len(rows)

    def _further_row(self, row: VerifyRow, result: VerifyOutcome | PacelineError) -> VerifyRow | None:
        """Return the row of the round after a result, if one is to follow by itself and has room."""
        if not row.further_count or not isinstance(result, Verdict):
            return None
        limits, length = self.runner.limits, result.cached_length + 1 + len(result.draft_token_ids)
        if length > min(limits.model_max_length, limits.cache_max_length):
            return None
        return replace(
            row,
            base_length=result.cached_length,
            token_ids=(result.next_token_id,),
            draft_token_ids=result.draft_token_ids,
            base_hash=None,
            scores_tokens=False,
            further_count=row.further_count - 1,
        )

    def _settled(self, rows: Sequence[VerifyRow]) -> list[VerifyOutcome | PacelineError]:
        """Run rows in one pass, and keep of each what is right."""
        outcomes = self.runner.forward([self._packed(row) for row in rows])
        chosen = {index: outcome for index, outcome in enumerate(outcomes) if isinstance(outcome, Tensor)}
        choosing = [self._choosing(rows[index], logits) for index, logits in chosen.items()]
        choices = dict(zip(chosen, self.runner.choose(choosing), strict=True))
        results = [
            self._settle(row, outcome, choices.get(index, ()))
            for index, (row, outcome) in enumerate(zip(rows, outcomes, strict=True))
        ]
        return self._with_drafts(rows, results)

    def _with_drafts(
        self, rows: Sequence[VerifyRow], results: list[VerifyOutcome | PacelineError]
    ) -> list[VerifyOutcome | PacelineError]:
        """Add what the heads draft, for the rows that ask for it."""
        asked = {
            index: HeadsRow(row.sequence_id, result.next_token_id, row.propose_count, rule_of(row))
            for index, (row, result) in enumerate(zip(rows, results, strict=True))
            if isinstance(result, Verdict) and row.propose_count
        }
        drafts = dict(zip(asked, self.runner.propose([*asked.values()]), strict=True))
        return [
            replace(result, draft_token_ids=drafts[index])
            if index in drafts and isinstance(result, Verdict)
            else result
            for index, result in enumerate(results)
        ]

    def _choosing(self, row: VerifyRow, logits: Tensor) -> Choosing:
        prefix = self.runner.cache.token_ids(row.sequence_id)[: row.base_length + len(row.token_ids)]
        logits = logits[-len(row.draft_token_ids) - 1 :]
        return self.runner.choosing(row.sequence_id, logits, rule_of(row), prefix, row.draft_token_ids)

    def _packed(self, row: VerifyRow) -> PackedRow:
        token_ids, following_count = row.token_ids + row.draft_token_ids, row.following_count
        if row.scores_tokens and following_count:
            # What follows the last token is not known: the logits after it would be computed for nothing.
            token_ids, following_count = token_ids[:-1], following_count + 1
        return PackedRow(
            row.sequence_id, row.base_length, token_ids, len(row.draft_token_ids), following_count, row.scores_tokens
        )

    def _settle(self, row: VerifyRow, outcome: Outcome, choices: Sequence[Choice]) -> VerifyOutcome | PacelineError:
        """Keep the accepted part of the cache; `choices` follow the last committed token and each draft token."""
        if isinstance(outcome, PacelineError):
            return outcome
        reused_count = self.runner.cache.reused_count(row.sequence_id)
        if isinstance(outcome, Prefilled):
            return replace(outcome, reused_count=reused_count)
        scores = self._scores(row, outcome)
        if isinstance(scores, PacelineError):
            self.runner.cache.truncate(row.sequence_id, row.base_length)
            return scores
        if isinstance(outcome, ScoredPart):
            return Prefilled(outcome.length, scores, reused_count)
        accepted = accepted_count(row.draft_token_ids, choices)
        if accepted and isinstance(choices[accepted], PacelineError):
            # Plain decoding would have come this far and perhaps ended here; the next round meets the error.
            accepted -= 1
        next_token = choices[accepted]
        if isinstance(next_token, PacelineError):
            self.runner.cache.truncate(row.sequence_id, row.base_length)
            return next_token
        cached_length = row.base_length + len(row.token_ids) + accepted
        self.runner.cache.truncate(row.sequence_id, cached_length)
        logprobs: list[TokenLogprobs] = []
        if row.top_logprob_count is not None:
            chosen = [*row.draft_token_ids[:accepted], next_token]
            logits = outcome[-len(row.draft_token_ids) - 1 :]
            logprobs = token_logprobs(logits, chosen, row.top_logprob_count)
        return Verdict(accepted, next_token, cached_length, tuple(logprobs), scores, reused_count)

    def _scores(self, row: VerifyRow, outcome: Tensor | ScoredPart) -> tuple[TokenLogprobs, ...] | NoChoice:
        """Return log-probabilities of the tokens after the row's first, as far as the logits before them are there."""
        if not row.scores_tokens or row.top_logprob_count is None:
            return ()
        logits = outcome.logits if isinstance(outcome, ScoredPart) else outcome
        scores = token_logprobs(logits, row.token_ids[1 : 1 + len(logits)], row.top_logprob_count)
        for position, one in enumerate(scores, row.base_length + 1):
            if isnan(one.logprob):
                return no_choice(position)
        return tuple(scores)

    def _check(self, row: VerifyRow) -> None:
        check_top_logprob_count(row.top_logprob_count)
        _check_scoring(row)
        if len(row.draft_token_ids) > MAX_DRAFT_COUNT:
            raise InvalidRequest(
                f"draft_token_ids has {len(row.draft_token_ids)} entries; send at most {MAX_DRAFT_COUNT}",
                field="draft_token_ids",
            )
        check_token_ids(row.draft_token_ids, self.runner.limits.vocabulary_size, "draft_token_ids")
        check_row(row, self.runner.limits, len(row.draft_token_ids))
        if not 0 <= row.propose_count <= MAX_DRAFT_COUNT:
            raise InvalidRequest(
                f"propose_count is {row.propose_count}; ask for 0 to {MAX_DRAFT_COUNT}", field="propose_count"
            )
        if not 0 <= row.further_count <= MAX_FURTHER_COUNT:
            raise InvalidRequest(
                f"further_count is {row.further_count}; ask for 0 to {MAX_FURTHER_COUNT}", field="further_count"
            )
        if row.following_count and row.draft_token_ids:
            raise InvalidRequest(
                f"draft_token_ids has {len(row.draft_token_ids)} entries, but {row.following_count} committed tokens "
                "are yet to come before them; send drafts with the last part",
                field="draft_token_ids",
            )


def _check_scoring(row: VerifyRow) -> None:
    if row.scores_tokens and row.top_logprob_count is None:
        raise InvalidRequest(
            "scores_tokens is set and top_logprob_count is not; set it too, to 0 for no other tokens",
            field="top_logprob_count",
        )
    if row.scores_tokens and row.following_count and len(row.token_ids) < 2:
        raise InvalidRequest(
            f"token_ids has {len(row.token_ids)} entries; with scores_tokens a part brings 2 at least, for its last "
            "token is not appended",
            field="token_ids",
        )


def accepted_count(draft_token_ids: Sequence[int], choices: Sequence[Choice]) -> int:
    """Count the leading draft tokens that equal the target's choices; `choices` has one more than the drafts."""
    for position, (drafted, chosen) in enumerate(zip(draft_token_ids, choices, strict=False)):
        if drafted != chosen:
            return position
    return len(draft_token_ids)


def _leaves_cores_to_draft(rows: Sequence[VerifyRow]) -> bool:
    # Calls without drafts may use the cores of the draft service, which is idle then.
    is_beside_draft = any(row.draft_token_ids and not row.draft_is_idle for row in rows)
    return is_beside_draft and sum(len(row.token_ids) - 1 for row in rows) < LONG_PROMPT
