"""What the HTTP door promises and costs, measured beside gRPC.

`http` is the door and its client; `exact`, `cost`, `formats`, `calls`, `malformed` and `failover` do the work; `parts`
prints what they find.
"""
