"""The only translator between `types` or `errors` and protobuf.

`x_to_pb` writes protobuf, `x_from_pb` reads it. The services check whether values make sense.
"""
