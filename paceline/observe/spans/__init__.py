"""Spans: made by the services (`setup`, `client`, `server`, `work`), and read again by `paceline trace`.

Written with the OpenTelemetry API. A tracer is passed to whoever makes spans; None is passed where tracing is off, and
then neither interceptors nor spans exist. docs/tracing.md lists the spans and their attributes.
"""
