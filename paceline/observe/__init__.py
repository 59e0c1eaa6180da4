"""Logs, metrics and spans of a running service, and reports made from spans afterwards."""
