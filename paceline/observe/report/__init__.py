"""Spans read again: where a request's time went, in a terminal or in Perfetto."""
