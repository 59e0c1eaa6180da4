"""What clients asked for, and how far it has come: requests, their generations, and what of these is to be read.

Knows nothing of rounds, services or gRPC.
"""
