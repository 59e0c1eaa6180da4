"""Generated from `protos/`."""
