"""Names on the wire: of services, of the methods that carry work, and of what callers of a stream are told at once."""

from paceline.v1 import draft_service_pb2, generation_service_pb2, target_service_pb2

GENERATION_SERVICE = generation_service_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name
DRAFT_SERVICE = draft_service_pb2.DESCRIPTOR.services_by_name["DraftService"].full_name
TARGET_SERVICE = target_service_pb2.DESCRIPTOR.services_by_name["TargetService"].full_name
GENERATE_TEXT = f"/{GENERATION_SERVICE}/GenerateText"
GENERATE_STREAM = f"/{GENERATION_SERVICE}/GenerateStream"
PROPOSE_TOKENS = f"/{DRAFT_SERVICE}/ProposeTokens"
VERIFY_TOKENS = f"/{TARGET_SERVICE}/VerifyTokens"
MOST_CALLS_KEY = "paceline-most-calls"
"""Names the calls that a `GenerateStream` takes, in the metadata that it is answered with at once."""
MOST_BYTES_KEY = "paceline-most-bytes"
"""Names, there too, the bytes that a message may have. One that is larger ends the stream with all its calls."""
