"""Spans of the services, made with the OpenTelemetry API and listed in docs/tracing.md.

Each user of spans gets a tracer. When tracing is off it gets None, and neither interceptors nor spans exist.
"""
