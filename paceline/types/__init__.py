"""The values that cross module borders. Frozen, free of protobuf, gRPC and torch.

Lengths and positions count tokens from the start of the prompt.
"""

from paceline.types.cluster import (
    CircuitState,
    ClusterDescription,
    ClusterStatistics,
    ReplicaDescription,
    ReplicaState,
)
from paceline.types.generation import (
    FinishReason,
    GenerationAccepted,
    GenerationFinish,
    GenerationRequest,
    OutputPiece,
    OutputToken,
    Prompt,
    ReceivedOutput,
    Text,
    TokenIds,
    Usage,
    UserMessage,
)
from paceline.types.models import CacheDescription, ModelDescription, ModelIdentity, PassTraffic, TokenizerFiles
from paceline.types.rounds import (
    CallTiming,
    HopTime,
    Prefilled,
    Proposal,
    Proposals,
    ProposeRow,
    RolledBack,
    SequenceLength,
    Verdict,
    Verdicts,
    VerifyOutcome,
    VerifyRow,
)
from paceline.types.sampling import GREEDY, ChoiceRule, SamplingParameters, TokenLogprobs

__all__ = [
    "CacheDescription",
    "CallTiming",
    "ChoiceRule",
    "CircuitState",
    "ClusterDescription",
    "ClusterStatistics",
    "FinishReason",
    "GREEDY",
    "GenerationAccepted",
    "GenerationFinish",
    "GenerationRequest",
    "HopTime",
    "ModelDescription",
    "ModelIdentity",
    "OutputPiece",
    "OutputToken",
    "PassTraffic",
    "Prefilled",
    "Prompt",
    "Proposal",
    "Proposals",
    "ProposeRow",
    "ReceivedOutput",
    "ReplicaDescription",
    "ReplicaState",
    "RolledBack",
    "SamplingParameters",
    "SequenceLength",
    "Text",
    "TokenIds",
    "TokenLogprobs",
    "TokenizerFiles",
    "Usage",
    "UserMessage",
    "Verdict",
    "Verdicts",
    "VerifyOutcome",
    "VerifyRow",
]
