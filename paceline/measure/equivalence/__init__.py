"""The check that outputs are the target's own, by the protocol of arXiv 2510.22876."""
