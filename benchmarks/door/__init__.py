"""What the HTTP door promises and costs, measured beside gRPC.

`http` is the client, `exact`, `formats` and `cost` do the work, `__main__` prints what they find.
"""
