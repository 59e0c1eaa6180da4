"""Metrics of the gateway."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from paceline.gateway.apis import APIS
from paceline.observe.metrics import REQUEST_BUCKETS_S

USUAL_STATUSES = (200, 400, 413, 429, 499, 500, 502, 503, 504)


class GatewayMetrics:
    def __init__(self, registry: CollectorRegistry, is_served: Callable[[], bool]) -> None:
        """`is_served` tells whether a coordinator serves the gateway."""
        available = Gauge(
            "paceline_gateway_coordinator_available",
            "1 while a coordinator answers the gateway and takes its token and certificate.",
            registry=registry,
        )
        available.set_function(is_served)
        self.ended = Counter(
            "paceline_gateway_requests",
            "Requests for outputs that ended, by path and HTTP status.",
            ["path", "status"],
            registry=registry,
        )
        # Expected labels exist from the start: a rate misses the step from nothing to one.
        for api in APIS:
            for status in USUAL_STATUSES:
                self.ended.labels(api.path, str(status))
        self.running = Gauge("paceline_gateway_requests_running", "Requests for outputs in work.", registry=registry)
        self.tokens = Counter(
            "paceline_gateway_output_tokens", "Tokens of output that came from coordinators.", registry=registry
        )
        self.first_token = Histogram(
            "paceline_gateway_time_to_first_token_seconds",
            "Time from a request to its first token.",
            buckets=REQUEST_BUCKETS_S,
            registry=registry,
        )
        self.duration = Histogram(
            "paceline_gateway_request_duration_seconds",
            "Time from a request to its end, if that was a success.",
            buckets=REQUEST_BUCKETS_S,
            registry=registry,
        )
