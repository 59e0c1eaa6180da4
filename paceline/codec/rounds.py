"""Translation of the rows of a round and their results."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from paceline import types
from paceline.checks import MAX_PREPARED_COUNT
from paceline.codec.models import identity_from_pb, identity_to_pb
from paceline.codec.sampling import logprobs_from_pb, logprobs_to_pb, rule_from_pb, rule_to_pb
from paceline.codec.status import error_from_pb, error_to_pb
from paceline.codec.versions import RULES_TOLD_ONCE, VERSION, version_of
from paceline.errors import PacelineError
from paceline.v1 import common_pb2, draft_service_pb2, target_service_pb2


def _context(rows: Sequence[types.ProposeRow] | Sequence[types.VerifyRow]) -> common_pb2.RequestContext:
    """Return the part of the context that depends on the rows; the transport adds the rest."""
    versions = [version_of(row.rule) for row in rows if row.rule]
    return common_pb2.RequestContext(wire_version=max(versions, default=RULES_TOLD_ONCE))


def _add_row(messages: Any, row: types.ProposeRow | types.VerifyRow) -> Any:
    """Add a message with what rows of both services have, and return it.

    Field by field, and only what is set: with all of them as arguments it takes half as long again.
    """
    message = messages.add() if row.rule is None else messages.add(sequence_rule=rule_to_pb(row.rule))
    message.sequence_id = row.sequence_id
    message.base_length = row.base_length
    message.token_ids.extend(row.token_ids)
    if row.base_hash is not None:
        message.base_hash = row.base_hash
    if row.following_count:
        message.following_count = row.following_count
    return message


def propose_rows_to_pb(rows: Sequence[types.ProposeRow]) -> draft_service_pb2.ProposeTokensRequest:
    request = draft_service_pb2.ProposeTokensRequest(context=_context(rows))
    for row in rows:
        message = _add_row(request.rows, row)
        message.draft_count = row.draft_count
        if row.prepare_count:
            message.prepare_count = row.prepare_count
    return request


def propose_rows_from_pb(request: draft_service_pb2.ProposeTokensRequest) -> list[types.ProposeRow]:
    return [
        types.ProposeRow(
            row.sequence_id,
            row.base_length,
            tuple(row.token_ids),
            row.draft_count,
            _rule(row, request.context),
            row.following_count,
            row.base_hash if row.HasField("base_hash") else None,
            row.prepare_count,
        )
        for row in request.rows
    ]


def _rule(
    row: draft_service_pb2.ProposeTokensRow | target_service_pb2.VerifyTokensRow, context: common_pb2.RequestContext
) -> types.ChoiceRule | None:
    if row.HasField("sequence_rule"):
        return rule_from_pb(row.sequence_rule)
    if row.HasField("rule"):
        return rule_from_pb(row.rule)
    return None if context.wire_version >= RULES_TOLD_ONCE else types.GREEDY


def proposals_to_pb(
    rows: Sequence[types.ProposeRow], proposals: types.Proposals
) -> draft_service_pb2.ProposeTokensResponse:
    response = draft_service_pb2.ProposeTokensResponse(
        timing=_timing_to_pb(proposals.timing),
        wire_version=VERSION,
        identity=identity_to_pb(proposals.identity),
    )
    for row, result in zip(rows, proposals.results, strict=True):
        message = response.results.add()
        message.sequence_id = row.sequence_id
        if isinstance(result, PacelineError):
            message.status.CopyFrom(error_to_pb(result))
            continue
        message.draft_token_ids.extend(result.draft_token_ids)
        message.cached_length = result.cached_length
        if result.prepared:
            message.prepared = True
    return response


def proposals_from_pb(response: draft_service_pb2.ProposeTokensResponse) -> types.Proposals:
    results = [
        error_from_pb(result.status)
        if result.HasField("status")
        else types.Proposal(tuple(result.draft_token_ids), result.cached_length, result.prepared)
        for result in response.results
    ]
    return types.Proposals(results, _timing_from_pb(response.timing), identity_from_pb(response.identity))


def prepared_to_pb(prepared: Iterable[types.PreparedDrafts]) -> draft_service_pb2.ProposeTokensResponse:
    return draft_service_pb2.ProposeTokensResponse(
        prepared=[
            draft_service_pb2.PreparedDrafts(
                sequence_id=one.sequence_id, length=one.length, hash=one.hash, draft_token_ids=one.draft_token_ids
            )
            for one in prepared
        ]
    )


def prepared_from_pb(response: draft_service_pb2.ProposeTokensResponse) -> list[types.PreparedDrafts]:
    """Return what a service tells unasked, but for what is more than any has to tell at once: reading takes time."""
    return [
        types.PreparedDrafts(one.sequence_id, one.length, one.hash, tuple(one.draft_token_ids[:MAX_PREPARED_COUNT]))
        for one in response.prepared[:MAX_PREPARED_COUNT]
    ]


def is_unasked(message: Any) -> bool:
    """Return whether a message of a stream is no answer: it has what was prepared, and no results."""
    return bool(message is not None and getattr(message, "prepared", ()) and not message.results)


def _timing_to_pb(timing: types.CallTiming) -> common_pb2.CallTiming:
    return common_pb2.CallTiming(
        queued_s=timing.queued_s,
        executed_s=timing.executed_s,
        others_s=timing.others_s,
        worked_s=timing.worked_s,
    )


def _timing_from_pb(message: common_pb2.CallTiming) -> types.CallTiming:
    return types.CallTiming(message.queued_s, message.executed_s, message.others_s, message.worked_s)


def verify_rows_to_pb(rows: Sequence[types.VerifyRow]) -> target_service_pb2.VerifyTokensRequest:
    request = target_service_pb2.VerifyTokensRequest(context=_context(rows))
    for row in rows:
        message = _add_row(request.rows, row)
        message.draft_token_ids.extend(row.draft_token_ids)
        if row.top_logprob_count is not None:
            message.top_logprob_count = row.top_logprob_count
        if row.draft_is_idle:
            message.drafted_without_model = True
        if row.scores_tokens:
            message.scores_tokens = True
        if row.propose_count:
            message.propose_count = row.propose_count
        if row.further_count:
            message.further_count = row.further_count
    return request


def verify_rows_from_pb(request: target_service_pb2.VerifyTokensRequest) -> list[types.VerifyRow]:
    return [
        types.VerifyRow(
            row.sequence_id,
            row.base_length,
            tuple(row.token_ids),
            tuple(row.draft_token_ids),
            _rule(row, request.context),
            row.top_logprob_count if row.HasField("top_logprob_count") else None,
            row.following_count,
            row.base_hash if row.HasField("base_hash") else None,
            row.drafted_without_model,
            row.scores_tokens,
            row.propose_count,
            row.further_count,
        )
        for row in request.rows
    ]


def verdicts_to_pb(
    rows: Sequence[types.VerifyRow], verdicts: types.Verdicts
) -> target_service_pb2.VerifyTokensResponse:
    response = target_service_pb2.VerifyTokensResponse(
        timing=_timing_to_pb(verdicts.timing),
        wire_version=VERSION,
        identity=identity_to_pb(verdicts.identity),
    )
    for row, result in zip(rows, verdicts.results, strict=True):
        message = response.results.add()
        message.sequence_id = row.sequence_id
        _write_outcome(message, result)
    return response


def _write_outcome(message: target_service_pb2.VerifyTokensResult, result: types.VerifyOutcome | PacelineError) -> None:
    """Write a result field by field, and only what is set: with all as arguments it takes three times as long."""
    if isinstance(result, PacelineError):
        message.status.CopyFrom(error_to_pb(result))
        return
    message.cached_length = result.cached_length
    if result.token_logprobs:
        message.token_logprobs.extend(map(logprobs_to_pb, result.token_logprobs))
    if result.reused_count:
        message.reused_count = result.reused_count
    if isinstance(result, types.Verdict):
        _write_choice(message, result)


def _write_choice(message: target_service_pb2.VerifyTokensResult, verdict: types.Verdict) -> None:
    message.accepted_count = verdict.accepted_count
    message.next_token_id = verdict.next_token_id
    if verdict.logprobs:
        message.logprobs.extend(map(logprobs_to_pb, verdict.logprobs))
    if verdict.draft_token_ids:
        message.draft_token_ids.extend(verdict.draft_token_ids)
    for one in verdict.further:
        _write_outcome(message.further.add(), one)


def verdicts_from_pb(
    rows: Sequence[types.VerifyRow], response: target_service_pb2.VerifyTokensResponse
) -> types.Verdicts:
    """Read the verdicts that answer these rows. Nothing is looked for that none of them asks for."""
    read = _reader_for(rows)
    results = [
        read(one) if one.HasField("next_token_id") and not one.HasField("status") else _outcome_from_pb(one)
        for one in response.results
    ]
    return types.Verdicts(results, _timing_from_pb(response.timing), identity_from_pb(response.identity))


def _reader_for(
    rows: Sequence[types.VerifyRow],
) -> Callable[[target_service_pb2.VerifyTokensResult], types.VerifyOutcome | PacelineError]:
    """Return what reads the verdicts of such rows: each field that is looked for takes time, set or not."""
    if any(row.top_logprob_count is not None or row.scores_tokens for row in rows):
        return _outcome_from_pb
    return _drafted_from_pb if any(row.propose_count or row.further_count for row in rows) else _choice_from_pb


def _choice_from_pb(result: target_service_pb2.VerifyTokensResult) -> types.Verdict:
    return types.Verdict(result.accepted_count, result.next_token_id, result.cached_length, (), (), result.reused_count)


def _drafted_from_pb(result: target_service_pb2.VerifyTokensResult) -> types.Verdict:
    """Read a choice, with what heads drafted after it and with further rounds."""
    further = result.further
    return types.Verdict(
        result.accepted_count,
        result.next_token_id,
        result.cached_length,
        (),
        (),
        result.reused_count,
        tuple(result.draft_token_ids),
        tuple(map(_drafted_from_pb, further)) if further else (),
    )


def _outcome_from_pb(result: target_service_pb2.VerifyTokensResult) -> types.VerifyOutcome | PacelineError:
    if result.HasField("status"):
        return error_from_pb(result.status)
    token_logprobs = tuple(map(logprobs_from_pb, result.token_logprobs))
    if not result.HasField("next_token_id"):
        return types.Prefilled(result.cached_length, token_logprobs, result.reused_count)
    return _verdict_from_pb(result, token_logprobs)


def _verdict_from_pb(
    result: target_service_pb2.VerifyTokensResult, token_logprobs: tuple[types.TokenLogprobs, ...] = ()
) -> types.Verdict:
    return types.Verdict(
        result.accepted_count,
        result.next_token_id,
        result.cached_length,
        tuple(map(logprobs_from_pb, result.logprobs)),
        token_logprobs,
        result.reused_count,
        tuple(result.draft_token_ids),
        tuple(map(_verdict_from_pb, result.further)),
    )


def lengths_from_pb(lengths: Iterable[common_pb2.SequenceLength]) -> list[types.SequenceLength]:
    return [types.SequenceLength(one.sequence_id, one.length) for one in lengths]


def lengths_to_pb(lengths: Iterable[types.SequenceLength]) -> list[common_pb2.SequenceLength]:
    return [common_pb2.SequenceLength(sequence_id=one.sequence_id, length=one.length) for one in lengths]


def rollbacks_to_pb(
    lengths: Iterable[types.SequenceLength], results: Iterable[types.RolledBack | PacelineError]
) -> list[common_pb2.RollbackResult]:
    return [
        common_pb2.RollbackResult(sequence_id=one.sequence_id, status=error_to_pb(result))
        if isinstance(result, PacelineError)
        else common_pb2.RollbackResult(
            sequence_id=one.sequence_id, cached_length=result.cached_length, freed_bytes=result.freed_bytes
        )
        for one, result in zip(lengths, results, strict=True)
    ]


def rollbacks_from_pb(results: Iterable[common_pb2.RollbackResult]) -> list[types.RolledBack | PacelineError]:
    return [
        error_from_pb(one.status) if one.HasField("status") else types.RolledBack(one.cached_length, one.freed_bytes)
        for one in results
    ]
