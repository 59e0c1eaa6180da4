"""The only translator between `types` or `errors` and protobuf.

Names: `x_to_pb` writes protobuf, `x_from_pb` reads it. Whether a value makes sense is for the service that owns it.
"""
