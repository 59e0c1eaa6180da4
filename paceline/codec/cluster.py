"""Translation of a cluster's description: its models, replicas, statistics and costs."""

from paceline import types
from paceline.codec.models import model_from_pb, model_to_pb, values_of
from paceline.codec.sources import (
    HOPS,
    SOURCE_TO_PB,
    hop_from_pb,
    hop_to_pb,
    source_from_pb,
    source_usage_from_pb,
    source_usage_to_pb,
)
from paceline.v1 import generation_service_pb2

# Another version may send values that are in none of these tables: they are read as UNSPECIFIED.
_STATE_TO_PB = {
    types.ReplicaState.UNSPECIFIED: generation_service_pb2.REPLICA_STATE_UNSPECIFIED,
    types.ReplicaState.UP: generation_service_pb2.REPLICA_STATE_UP,
    types.ReplicaState.DRAINING: generation_service_pb2.REPLICA_STATE_DRAINING,
    types.ReplicaState.DOWN: generation_service_pb2.REPLICA_STATE_DOWN,
    types.ReplicaState.REFUSED: generation_service_pb2.REPLICA_STATE_REFUSED,
}
_STATE_FROM_PB = {pb: state for state, pb in _STATE_TO_PB.items()}
_CIRCUIT_TO_PB = {
    types.CircuitState.UNSPECIFIED: generation_service_pb2.CIRCUIT_STATE_UNSPECIFIED,
    None: generation_service_pb2.CIRCUIT_STATE_UNSPECIFIED,  # a description without a circuit; read as UNSPECIFIED
    types.CircuitState.CLOSED: generation_service_pb2.CIRCUIT_STATE_CLOSED,
    types.CircuitState.OPEN: generation_service_pb2.CIRCUIT_STATE_OPEN,
    types.CircuitState.HALF_OPEN: generation_service_pb2.CIRCUIT_STATE_HALF_OPEN,
}
_CIRCUIT_FROM_PB = {pb: state for state, pb in _CIRCUIT_TO_PB.items()}


def cluster_to_pb(cluster: types.ClusterDescription) -> generation_service_pb2.DescribeClusterResponse:
    return generation_service_pb2.DescribeClusterResponse(
        target=model_to_pb(cluster.target),
        draft=model_to_pb(cluster.draft) if cluster.draft else None,
        batch_size=cluster.batch_size,
        draft_count=cluster.draft_count,
        policy=cluster.policy,
        lane_count=cluster.lane_count,
        live_sequence_count=cluster.live_sequence_count,
        waiting_sequence_count=cluster.waiting_sequence_count,
        statistics=_statistics_to_pb(cluster.statistics),
        targets=map(_replica_to_pb, cluster.targets),
        drafts=map(_replica_to_pb, cluster.drafts),
        costs=_costs_to_pb(cluster.costs) if cluster.costs else None,
        process_count=cluster.process_count,
        process_index=cluster.process_index,
        draft_sources=None
        if cluster.sources is None
        else generation_service_pb2.DraftSources(sources=[SOURCE_TO_PB[one] for one in cluster.sources]),
    )


def cluster_from_pb(message: generation_service_pb2.DescribeClusterResponse) -> types.ClusterDescription:
    return types.ClusterDescription(
        target=model_from_pb(message.target),
        draft=model_from_pb(message.draft) if message.HasField("draft") else None,
        batch_size=message.batch_size,
        draft_count=message.draft_count if message.HasField("draft_count") else None,
        policy=message.policy,
        lane_count=message.lane_count,
        live_sequence_count=message.live_sequence_count,
        waiting_sequence_count=message.waiting_sequence_count,
        statistics=_statistics_from_pb(message.statistics),
        targets=tuple(map(_replica_from_pb, message.targets)),
        drafts=tuple(map(_replica_from_pb, message.drafts)),
        costs=_costs_from_pb(message.costs) if message.HasField("costs") else None,
        process_count=message.process_count or 1,
        process_index=message.process_index,
        sources=tuple(map(source_from_pb, message.draft_sources.sources))
        if message.HasField("draft_sources")
        else None,
    )


def _costs_to_pb(costs: types.MeasuredCosts) -> generation_service_pb2.MeasuredCosts:
    return generation_service_pb2.MeasuredCosts(
        calls=[generation_service_pb2.CallCosts(**values_of(types.CallCosts, one)) for one in costs.calls],
        acceptances=[
            generation_service_pb2.AcceptanceCounts(
                **values_of(types.AcceptanceCounts, one) | {"source": SOURCE_TO_PB[one.source]}
            )
            for one in costs.acceptances
        ],
    )


def _costs_from_pb(message: generation_service_pb2.MeasuredCosts) -> types.MeasuredCosts:
    return types.MeasuredCosts(
        tuple(types.CallCosts(**values_of(types.CallCosts, one)) for one in message.calls),
        tuple(
            types.AcceptanceCounts(
                source_from_pb(one.source),
                one.draft_model,
                tuple(one.compared_counts),
                tuple(one.right_counts),
                one.output_deviation,
            )
            for one in message.acceptances
        ),
    )


def _replica_to_pb(replica: types.ReplicaDescription) -> generation_service_pb2.ReplicaDescription:
    return generation_service_pb2.ReplicaDescription(
        address=replica.address,
        state=_STATE_TO_PB[replica.state],
        sequence_count=replica.sequence_count,
        circuit=_CIRCUIT_TO_PB[replica.circuit],
        model_id=replica.model_id,
    )


def _replica_from_pb(message: generation_service_pb2.ReplicaDescription) -> types.ReplicaDescription:
    state = _STATE_FROM_PB.get(message.state, types.ReplicaState.UNSPECIFIED)
    circuit = _CIRCUIT_FROM_PB.get(message.circuit, types.CircuitState.UNSPECIFIED)
    return types.ReplicaDescription(message.address, state, message.sequence_count, circuit, message.model_id)


def _statistics_to_pb(statistics: types.ClusterStatistics) -> generation_service_pb2.ClusterStatistics:
    sizes = [
        generation_service_pb2.GroupSizeCount(group_size=size, round_count=count)
        for size, count in statistics.round_counts_by_group_size
    ]
    hops = {name: hop_to_pb(getattr(statistics, name)) for name in HOPS}
    lists = {"round_counts_by_group_size": sizes, "sources": map(source_usage_to_pb, statistics.sources)}
    values = values_of(types.ClusterStatistics, statistics)
    return generation_service_pb2.ClusterStatistics(**values | lists | hops)


def _statistics_from_pb(message: generation_service_pb2.ClusterStatistics) -> types.ClusterStatistics:
    values = values_of(types.ClusterStatistics, message) | {
        "accepted_counts_by_position": tuple(message.accepted_counts_by_position),
        "round_counts_by_group_size": tuple(
            (one.group_size, one.round_count) for one in message.round_counts_by_group_size
        ),
        "sources": tuple(map(source_usage_from_pb, message.sources)),
    }
    hops = {name: hop_from_pb(getattr(message, name)) for name in HOPS}
    return types.ClusterStatistics(**values | hops)
