"""What can be seen of a running service: logs, metrics and spans; and what is read of spans afterwards."""
