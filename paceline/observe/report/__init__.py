"""Reports from spans on where a request's time went, for a terminal or Perfetto."""
