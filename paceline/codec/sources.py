"""Translation of what both outputs and a cluster tell: sources of drafts, what came of them, and times of hops."""

from paceline import types
from paceline.codec.models import values_of
from paceline.v1 import generation_service_pb2

HOPS = ("propose", "verify")
"""Fields that are times of a hop."""
SOURCE_TO_PB = {
    types.DraftSource.UNSPECIFIED: generation_service_pb2.DRAFT_SOURCE_UNSPECIFIED,
    types.DraftSource.DRAFT: generation_service_pb2.DRAFT_SOURCE_DRAFT,
    types.DraftSource.SUFFIX: generation_service_pb2.DRAFT_SOURCE_SUFFIX,
    types.DraftSource.PREDICTION: generation_service_pb2.DRAFT_SOURCE_PREDICTION,
    types.DraftSource.HEADS: generation_service_pb2.DRAFT_SOURCE_HEADS,
}
_SOURCE_FROM_PB = {pb: source for source, pb in SOURCE_TO_PB.items()}


def source_from_pb(value: generation_service_pb2.DraftSource.ValueType) -> types.DraftSource:
    """Read a source. One that only another version knows is UNSPECIFIED."""
    return _SOURCE_FROM_PB.get(value, types.DraftSource.UNSPECIFIED)


def source_usage_to_pb(usage: types.SourceUsage) -> generation_service_pb2.SourceUsage:
    values = values_of(types.SourceUsage, usage) | {"source": SOURCE_TO_PB[usage.source]}
    return generation_service_pb2.SourceUsage(**values)


def source_usage_from_pb(message: generation_service_pb2.SourceUsage) -> types.SourceUsage:
    source = source_from_pb(message.source)
    return types.SourceUsage(**values_of(types.SourceUsage, message) | {"source": source})


def hop_to_pb(hop: types.HopTime) -> generation_service_pb2.HopTime:
    return generation_service_pb2.HopTime(**values_of(types.HopTime, hop))


def hop_from_pb(message: generation_service_pb2.HopTime) -> types.HopTime:
    return types.HopTime(**values_of(types.HopTime, message))
