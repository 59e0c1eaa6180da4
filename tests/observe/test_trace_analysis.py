"""From spans to hops: sums, tables, the verdict, the waterfall and the Chrome trace."""

import json
import re
import socket
from collections import defaultdict
from dataclasses import replace
from io import StringIO
from pathlib import Path
from random import Random
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span
from rich.console import Console
from typer.testing import CliRunner

from paceline.cli.app import app
from paceline.errors import InvalidRequest
from paceline.observe.records import SpanRecord, from_line, read_spans, to_line
from paceline.observe.report.analysis import (
    HOPS,
    REMEDIES,
    ROUND_HOPS,
    Drafts,
    drafts_by_source,
    nearest_rank,
    requests_of,
    summarize,
    verdict,
)
from paceline.observe.report.perfetto import aligned, trace_events
from paceline.observe.report.receiver import Receiver
from paceline.observe.report.rendering import SOURCE_LETTERS, hop_table, source_table, waterfall
from paceline.types import SOURCE_NAMES
from tests.commands import paceline_here
from tests.fakes.timelines import Hops, timeline

TYPICAL: Hops = dict(zip(ROUND_HOPS, (0, 1, 1, 2, 0, 10, 3, 4, 30), strict=True))
rounds_of_any_length = st.lists(
    st.fixed_dictionaries({hop: st.integers(0, 500) for hop in ROUND_HOPS}), min_size=1, max_size=8
)
skews = st.integers(-10_000, 10_000)


@given(rounds_of_any_length, st.integers(0, 50), st.integers(0, 50), skews, st.randoms())
def test_hops_add_up_to_the_latency_in_any_order_of_spans_and_under_any_skew_of_clocks(
    rounds: list[Hops], before_ms: int, after_ms: int, skew_ms: int, random: Random
) -> None:
    made = timeline(rounds, before_ms, after_ms, skew_ms)
    random.shuffle(made.spans)
    (request,) = requests_of(made.spans)
    assert sum(request.hops_s.values()) == pytest.approx(made.latency_ms / 1e3, abs=1e-9)
    assert request.hops_s["other"] == pytest.approx((before_ms + after_ms) / 1e3, abs=1e-9)
    for hop in ROUND_HOPS:
        assert [one.hops_s[hop] for one in request.rounds] == pytest.approx([one[hop] / 1e3 for one in made.told])
    assert [one.accepted_count for one in request.rounds] == [2] * len(rounds)


@given(rounds_of_any_length, skews)
def test_in_the_chrome_trace_every_span_lies_inside_its_cause_whatever_the_clocks_say(
    rounds: list[Hops], skew_ms: int
) -> None:
    spans = timeline(rounds, skew_ms=skew_ms).spans
    moved = {(one.trace_id, one.span_id): one for one in aligned(spans)}
    for span in spans:
        own = moved[span.trace_id, span.span_id]
        assert own.duration_s == span.duration_s
        if span.parent_id:
            cause = moved[span.trace_id, span.parent_id]
            assert cause.start_ns <= own.start_ns <= own.end_ns <= cause.end_ns


@given(rounds_of_any_length)
def test_in_the_chrome_trace_spans_of_a_row_nest_or_follow_each_other(rounds: list[Hops]) -> None:
    spans = timeline(rounds, number=1).spans + timeline(rounds, number=2).spans
    events = [one for one in trace_events(spans) if one["ph"] == "X"]
    rows: defaultdict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        assert event["ts"] >= 0
        rows[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for row in rows.values():
        for start, end in row:
            for other_start, other_end in row:
                apart = end <= other_start or other_end <= start
                nested = (start <= other_start and other_end <= end) or (other_start <= start and end <= other_end)
                assert apart or nested


@given(st.lists(st.floats(0, 100), min_size=1), st.integers(1, 100))
def test_a_percentile_is_the_least_value_that_so_many_do_not_exceed(values: list[float], percent: int) -> None:
    found = nearest_rank(values, percent)
    assert found in values
    assert sum(one <= found for one in values) * 100 >= percent * len(values)
    assert sum(one < found for one in values) * 100 < percent * len(values)


def test_the_verdict_names_the_hop_with_most_of_the_latency_and_its_numbers() -> None:
    for hop in HOPS:
        rounds = [TYPICAL if hop == "other" else TYPICAL | {hop: 700}] * 3
        requests = requests_of(timeline(rounds, after_ms=5000 if hop == "other" else 0).spans)
        sentence = verdict(requests)
        share = next(one.share for one in summarize(requests) if one.hop == hop)
        assert sentence.startswith(f"Fix {hop} first: {share:.0%} of the latency, ")
        assert REMEDIES[hop] in sentence
    assert set(REMEDIES) == set(HOPS)


def test_shares_of_all_hops_are_the_whole_latency() -> None:
    spans = [span for number in (1, 2, 3) for span in timeline([TYPICAL] * number, 4, 5, number=number).spans]
    requests = requests_of(spans)
    assert [len(one.rounds) for one in requests] == [1, 2, 3]
    assert sum(one.share for one in summarize(requests)) == pytest.approx(1)


def of_output(span: SpanRecord, index: int) -> SpanRecord:
    """Return the same round, for that output of its request."""
    return replace(span, attributes=dict(span.attributes) | {"paceline.completion_index": index})


def test_of_a_request_with_several_outputs_the_one_that_ended_last_counts() -> None:
    request, *others = timeline([TYPICAL, TYPICAL | {"verify execute": 90}, TYPICAL]).spans
    rounds = [one for one in others if one.name == "round"]
    spans = [request, of_output(rounds[0], 0), of_output(rounds[1], 0), of_output(rounds[2], 1)]
    (found,) = requests_of(spans)
    assert [one.span.span_id for one in found.rounds] == [rounds[2].span_id]


@pytest.mark.parametrize(
    "how", [{"is_error": True}, {"attributes": {"paceline.is_cut_off": True}}], ids=["failed", "cut off"]
)
def test_a_round_that_did_not_end_well_counts_as_wire_to_the_target(how: dict[str, Any]) -> None:
    request, queue, round_, *_ = timeline([TYPICAL]).spans
    (found,) = requests_of([request, queue, replace(round_, **{"attributes": {}} | how)])
    expected = dict.fromkeys(HOPS, 0.0) | {"queued": 0.001, "verify wire": 0.050}
    assert found.hops_s == pytest.approx(expected)


def test_the_sum_of_later_rounds_counts_for_shares_and_not_for_percentiles() -> None:
    whole = timeline([TYPICAL, TYPICAL | {"draft execute": 30}, TYPICAL])
    request, queue, first, second, third, *_ = whole.spans
    sums = {name: value + third.attributes[name] for name, value in second.attributes.items()}
    sums |= {"paceline.round_count": 2, "paceline.coordinator_s": 0.002, "paceline.waited_s": 0.002}
    later = replace(second, name="later_rounds", end_ns=third.end_ns, attributes=sums)
    (found,) = requests_of([request, queue, first, later])
    assert found.hops_s == pytest.approx(requests_of(whole.spans)[0].hops_s)
    assert [one.round_count for one in found.rounds] == [1, 2]
    draft = next(one for one in summarize([found]) if one.hop == "draft execute")
    assert [draft.p50_s, draft.p99_s] == pytest.approx([TYPICAL["draft execute"] / 1e3] * 2)
    later = replace(later, attributes={name: value for name, value in sums.items() if "group" not in name})
    (found,) = requests_of([request, queue, first, later])
    lines = printed(120, waterfall(found, 120), hop_table(summarize([found]), [found]))
    assert "2 rounds" in lines
    assert "1 requests, 3 rounds" in lines


def test_in_the_chrome_trace_outputs_of_one_request_have_rows_of_their_own() -> None:
    request, _, first, second, *_ = timeline([TYPICAL, TYPICAL]).spans
    other = replace(second, start_ns=first.start_ns + 1, end_ns=first.end_ns + 1)
    rows = [one["tid"] for one in trace_events([request, first, other]) if one["ph"] == "X"]
    assert rows[0] == rows[1] != rows[2]


def printed(console_width: int, *renderables: object) -> str:
    out = StringIO()
    console = Console(file=out, width=console_width)
    for one in renderables:
        console.print(one)
    return out.getvalue()


def test_the_waterfall_has_a_row_a_round_with_its_hops_and_its_place() -> None:
    (request,) = requests_of(timeline([TYPICAL, TYPICAL | {"draft queue": 25}], before_ms=2).spans)
    lines = printed(120, waterfall(request, 120)).splitlines()
    assert request.span.trace_id in lines[0]
    rows = [line.split() for line in lines if "2/5" in line]
    assert [row[0] for row in rows] == ["3", "54"]
    assert [row[-8:] for row in rows] == [
        ["2.0", "0.0", "10", "3.0", "4.0", "30", "2/5", "1"],
        ["2.0", "25", "10", "3.0", "4.0", "30", "2/5", "1"],
    ]
    bars = [line.count("█") for line in lines if "2/5" in line]
    assert bars[1] > bars[0] > 0


def test_drafts_are_told_by_source_round_by_round_and_in_all() -> None:
    request, _, first, second, third, *_ = timeline([TYPICAL] * 3).spans
    assert {one.name for one in (first, second, third)} == {"round"}
    named = [replace(first, attributes={**first.attributes, "paceline.draft_source": "suffix"})]
    named.append(replace(second, attributes={**second.attributes, "paceline.draft_source": "draft"}))
    sums = {"paceline.round_count": 9, "paceline.draft.drafted_count": 30, "paceline.draft.accepted_count": 24}
    sums |= {"paceline.suffix.drafted_count": 7, "paceline.suffix.accepted_count": 1, "paceline.drafted_count": 37}
    named.append(replace(third, name="later_rounds", attributes=sums))
    found = requests_of([request, *named])
    assert drafts_by_source(found) == {"draft": Drafts(35, 26), "suffix": Drafts(12, 3)}
    table = source_table(found)
    assert table
    rows = [line.split("│")[1:-1] for line in printed(100, table).splitlines() if line.startswith("│")]
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["draft", "35", "26", "74.3%"],
        ["suffix", "12", "3", "25.0%"],
    ]
    lines = printed(120, waterfall(found[0], 120))
    assert "2/5 s" in lines
    assert "2/5 d" in lines
    assert "0/37 ds" in lines
    assert "d draft s suffix" in lines


def test_drafts_by_source_are_those_of_all_outputs() -> None:
    """Those of the output that ended last alone were told."""
    request, _, first, second, *_ = timeline([TYPICAL] * 2).spans
    assert {one.name for one in (first, second)} == {"round"}
    named = [replace(one, attributes={**one.attributes, "paceline.draft_source": "heads"}) for one in (first, second)]
    found = requests_of([request, *(of_output(one, index) for index, one in enumerate(named))])
    assert len(found[0].rounds) == 1
    assert drafts_by_source(found) == {"heads": Drafts(10, 4)}


def test_each_source_has_a_letter_of_its_own() -> None:
    assert SOURCE_LETTERS.keys() == set(SOURCE_NAMES)
    assert len(set(SOURCE_LETTERS.values())) == len(SOURCE_LETTERS)


def test_spans_of_before_there_were_sources_tell_none() -> None:
    requests = requests_of(timeline([TYPICAL]).spans)
    assert (drafts_by_source(requests), source_table(requests)) == ({}, None)


def test_every_row_of_the_waterfall_shows_however_short_its_round() -> None:
    (request,) = requests_of(timeline([TYPICAL] * 200 + [TYPICAL | {"verify execute": 60_000}]).spans)
    lines = [line for line in printed(100, waterfall(request, 100)).splitlines() if "2/5" in line]
    assert len(lines) == 201
    assert all("█" in line for line in lines)


def test_the_table_has_every_hop() -> None:
    requests = requests_of(timeline([TYPICAL] * 3).spans)
    text = printed(100, hop_table(summarize(requests), requests))
    assert "1 requests, 3 rounds" in text
    for hop in HOPS:
        assert hop in text


@given(rounds_of_any_length)
def test_a_span_and_its_line_are_the_same(rounds: list[Hops]) -> None:
    for span in timeline(rounds).spans:
        assert from_line(to_line(span)) == span


def test_a_line_cut_short_by_a_kill_is_passed_over_and_a_wrong_one_named(tmp_path: Path) -> None:
    spans = timeline([TYPICAL]).spans
    path = tmp_path / "spans.jsonl"
    path.write_text("".join(to_line(one) + "\n" for one in spans) + to_line(spans[0])[:30])
    assert read_spans([str(path)]) == spans
    untimed = to_line(replace(spans[0], start_ns="a"))  # type: ignore[arg-type]
    for wrong in (
        "{",
        "[1]",
        "{}",
        '{"links": 3}',
        untimed,
        re.sub(r'"end_ns":\d+', '"end_ns":1e400', to_line(spans[0])),
    ):
        path.write_text(f"{to_line(spans[0])}\n{wrong}\n")
        with pytest.raises(InvalidRequest, match="line 2 of .*spans.jsonl"):
            read_spans([str(path)])
    with pytest.raises(InvalidRequest, match="missing.jsonl cannot be read"):
        read_spans([str(tmp_path / "missing.jsonl")])


def test_a_taken_port_to_receive_at_is_named_with_its_flag() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        status, out, err = paceline_here("trace", "--listen", f"127.0.0.1:{taken.getsockname()[1]}")
    assert (status, out) == (1, "")
    assert "the port is taken; choose another --listen" in err


@pytest.mark.parametrize("name", ["name", "trace_id", "span_id", "parent_id", "service", "instance", "attributes"])
def test_a_line_whose_fields_are_of_another_kind_is_named(name: str, tmp_path: Path) -> None:
    spans = [json.loads(to_line(one)) for one in timeline([TYPICAL]).spans]
    path = tmp_path / "spans.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in (spans[0], spans[1] | {name: [5]})))
    status, out, err = paceline_here("trace", str(path))
    assert (status, out) == (1, "")
    assert "line 2 of " in err and f"{name} is [5] and no " in err


@pytest.mark.parametrize("name", ["paceline.target.execute_s", "paceline.suffix.drafted_count"])
def test_a_line_that_counts_in_words_is_named(name: str, tmp_path: Path) -> None:
    span = json.loads(to_line(timeline([TYPICAL]).spans[0]))
    path = tmp_path / "spans.jsonl"
    path.write_text(json.dumps(span | {"attributes": span["attributes"] | {name: "three"}}) + "\n")
    status, out, err = paceline_here("trace", str(path))
    assert (status, out) == (1, "")
    assert "line 1 of " in err and f"{name} is 'three' and no number" in err


@pytest.mark.parametrize(
    ("fields", "attributes", "words"),
    [
        ({"start_ns": 10**400}, {}, "no time in nanoseconds"),
        ({"end_ns": -1}, {}, "end_ns is -1 and no time in nanoseconds"),
        ({}, {"paceline.drafted_count": float("nan")}, "paceline.drafted_count is nan and no number"),
        ({}, {"paceline.target.wire_s": float("inf")}, "paceline.target.wire_s is inf and no number"),
        ({}, {"paceline.suffix.drafted_count": 10**400}, "and no number"),
        ({}, {"paceline.completion_index": [1]}, "paceline.completion_index is [1] and no number"),
    ],
)
def test_a_line_with_numbers_that_cannot_be_reckoned_with_is_named(
    fields: dict[str, object], attributes: dict[str, object], words: str, tmp_path: Path
) -> None:
    """Each ended the command by a traceback."""
    spans = [json.loads(to_line(one)) for one in timeline([TYPICAL]).spans]
    own = next(one for one in spans if one["name"] == "round")
    own |= fields | {"attributes": own["attributes"] | attributes}
    path = tmp_path / "spans.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in spans))
    status, out, err = paceline_here("trace", str(path), "--perfetto", str(tmp_path / "trace.json"))
    assert (status, out) == (1, "")
    assert f"line {spans.index(own) + 1} of " in err and words in err


def test_a_line_of_endless_lists_is_named(tmp_path: Path) -> None:
    path = tmp_path / "spans.jsonl"
    path.write_text("[" * 100_000 + "\n")
    status, _, err = paceline_here("trace", str(path))
    assert (status, "line 1 of " in err) == (1, True)


@pytest.mark.parametrize("named", ["spans.jsonl", "*.jsonl", ""])
def test_the_chrome_trace_is_not_written_over_the_spans(named: str, tmp_path: Path) -> None:
    """They were gone, and the command said that all was well."""
    path = tmp_path / "spans.jsonl"
    path.write_text("".join(to_line(one) + "\n" for one in timeline([TYPICAL]).spans))
    spans = path.read_bytes()
    status, out, err = paceline_here("trace", str(tmp_path / named), "--perfetto", str(path))
    assert (status, out) == (1, "")
    assert f"--perfetto {path} is the same file as FILES {path}" in err
    assert path.read_bytes() == spans


def test_spans_that_are_their_own_cause_stay_where_they_are() -> None:
    one, other = timeline([TYPICAL]).spans[:2]
    one, other = replace(one, parent_id=other.span_id), replace(other, parent_id=one.span_id)
    alone = replace(one, span_id="f" * 16, parent_id="f" * 16)
    assert aligned([one, other, alone]) == [one, other, alone]


def test_requests_that_took_no_time_have_no_shares(tmp_path: Path) -> None:
    path = tmp_path / "spans.jsonl"
    spans = [json.loads(to_line(one)) for one in timeline([TYPICAL]).spans]
    path.write_text("".join(json.dumps(one | {"start_ns": 5, "end_ns": 5}) + "\n" for one in spans))
    status, _, err = paceline_here("trace", str(path))
    assert (status, err) == (0, "")


def write_files(folder: Path) -> list[SpanRecord]:
    spans = timeline([TYPICAL] * 2, number=1).spans + timeline([TYPICAL] * 4, number=2).spans
    for service in ("coordinator", "draft", "target"):
        own = [one for one in spans if one.service.endswith(service)]
        (folder / f"{service}.jsonl").write_text("".join(to_line(one) + "\n" for one in own))
    return spans


def test_the_command_shows_the_slowest_request_the_table_and_the_verdict_and_writes_the_file(tmp_path: Path) -> None:
    spans = write_files(tmp_path)
    perfetto = tmp_path / "perfetto.json"
    result = CliRunner().invoke(app, ["trace", str(tmp_path / "*.jsonl"), "--perfetto", str(perfetto)])
    assert result.exit_code == 0
    twice = CliRunner().invoke(app, ["trace", str(tmp_path), str(tmp_path / "*.jsonl")])
    assert twice.stdout == CliRunner().invoke(app, ["trace", str(tmp_path)]).stdout, "files may be named twice"
    assert f"request {2:032x}" in result.stdout
    assert "2 requests, 6 rounds" in result.stdout
    assert "Fix verify execute first" in result.stdout
    events = json.loads(perfetto.read_text())["traceEvents"]
    assert {one["name"] for one in events if one["ph"] == "X"} == {one.name for one in spans}
    processes = {one["args"]["name"] for one in events if one["name"] == "process_name"}
    assert processes == {"paceline-coordinator", "draft", "target"}


@pytest.mark.review
def test_every_row_of_the_chrome_trace_has_a_name() -> None:
    """review G10"""
    events = trace_events(timeline([TYPICAL] * 3, number=1).spans + timeline([TYPICAL], number=2).spans)
    used = {(one["pid"], one["tid"]) for one in events if one["ph"] == "X"}
    names = {(one["pid"], one["tid"]): one["args"]["name"] for one in events if one["name"] == "thread_name"}
    assert used == names.keys()
    assert "generate 1" in names.values()


@pytest.mark.review
@pytest.mark.parametrize("width", ["60", "20"])
def test_a_folder_of_spans_is_read_and_nothing_is_cut_short_in_a_narrow_terminal(tmp_path: Path, width: str) -> None:
    """review G10"""
    write_files(tmp_path)
    result = CliRunner().invoke(app, ["trace", str(tmp_path)], env={"COLUMNS": width})
    assert result.exit_code == 0, result.exception
    assert f"request {2:032x}" in result.stdout
    assert "…" not in result.stdout
    assert "..." not in result.stdout


def test_the_command_shows_the_request_that_is_asked_for(tmp_path: Path) -> None:
    write_files(tmp_path)
    result = CliRunner().invoke(app, ["trace", str(tmp_path / "*.jsonl"), "--request", f"{1:032x}"])
    assert f"request {1:032x}" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give files of spans"),
        (["x.jsonl", "--listen", "127.0.0.1:0"], "give files of spans"),
        (["--listen", "4317"], "is not HOST:PORT"),
    ],
)
def test_the_command_says_what_it_needs(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["trace", *arguments])
    assert result.exit_code == 2
    assert words in " ".join(result.stderr.replace("│", " ").split())


@pytest.mark.parametrize(("request_id", "words"), [("f" * 32, "begins with ffff"), ("", "of any request")])
def test_a_request_that_is_not_there_is_named(tmp_path: Path, request_id: str, words: str) -> None:
    write_files(tmp_path)
    if not request_id:
        (tmp_path / "coordinator.jsonl").unlink()
    result = CliRunner().invoke(
        app, ["trace", str(tmp_path / "*.jsonl"), *(["--request", request_id] * bool(request_id))]
    )
    assert isinstance(result.exception, InvalidRequest)
    assert words in result.exception.message


def test_rounds_without_time_of_their_own_are_in_no_percentile() -> None:
    """A further round that a target ran by itself halved the median of every hop to nothing."""
    (request,) = requests_of(timeline([TYPICAL] * 3, 0, 0, 0).spans)
    whole = summarize([request])
    further = [replace(one, span=replace(one.span, end_ns=one.span.start_ns)) for one in request.rounds]
    empty = [replace(one, hops_s=dict.fromkeys(one.hops_s, 0.0)) for one in further]
    both = summarize([replace(request, rounds=(*request.rounds, *empty, *empty))])
    assert [(one.p50_s, one.p90_s) for one in both] == [(one.p50_s, one.p90_s) for one in whole]


async def test_a_received_span_with_a_count_that_is_none_is_refused_and_others_are_kept() -> None:
    """`paceline trace --listen` ended in a traceback for one, and lost all that it had received."""
    names = ("paceline.drafted_count", "paceline.completion_index")
    odd = [KeyValue(key=names[0], value=AnyValue(double_value=float("nan")))]
    odd += [KeyValue(key=names[1], value=AnyValue(array_value=ArrayValue(values=[AnyValue(int_value=1)])))]
    good = [KeyValue(key=name, value=AnyValue(int_value=1)) for name in names]
    spans = [Span(name="round", span_id=bytes(8), attributes=own) for own in ([odd[0]], good, [odd[1]])]
    request = ExportTraceServiceRequest(resource_spans=[ResourceSpans(scope_spans=[ScopeSpans(spans=spans)])])
    receiver, context = Receiver(), cast(Any, None)
    told = (await receiver.Export(request, context)).partial_success
    assert [one.attributes for one in receiver.spans] == [dict.fromkeys(names, 1)]
    assert told.rejected_spans == 2 and "paceline.completion_index is [1] and no number" in told.error_message
