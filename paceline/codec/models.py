"""Translation of model descriptions and tokenizer files."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import fields
from typing import Any

from paceline import types
from paceline.errors import PeerFailed
from paceline.v1 import common_pb2, target_service_pb2

PIECE_BYTES = 1 << 16
"""Much less than services' limits on a message may be, for which `LEAST_MESSAGE_BYTES` leaves room."""


def model_to_pb(model: types.ModelDescription) -> common_pb2.ModelDescription:
    cache = common_pb2.CacheDescription(**values_of(types.CacheDescription, model.cache))
    compute = common_pb2.ComputeDescription(**values_of(types.ComputeDescription, model.compute))
    inner = {"cache": cache, "identity": identity_to_pb(model.identity), "compute": compute}
    return common_pb2.ModelDescription(**values_of(types.ModelDescription, model) | inner)


def model_from_pb(message: common_pb2.ModelDescription) -> types.ModelDescription:
    cache = types.CacheDescription(**values_of(types.CacheDescription, message.cache))
    values = values_of(types.ModelDescription, message)
    compute = types.ComputeDescription(**values_of(types.ComputeDescription, message.compute))
    inner = {"cache": cache, "identity": identity_from_pb(message.identity), "compute": compute}
    return types.ModelDescription(**values | {"end_token_ids": tuple(message.end_token_ids)} | inner)


def identity_to_pb(identity: types.ModelIdentity) -> common_pb2.ModelIdentity:
    return common_pb2.ModelIdentity(model_digest=identity.model_digest, incarnation=identity.incarnation)


def identity_from_pb(message: common_pb2.ModelIdentity) -> types.ModelIdentity:
    return types.ModelIdentity(message.model_digest, message.incarnation)


def values_of(kind: type[Any], source: object) -> dict[str, Any]:
    """Return the values of `source` for the field names of `kind`: messages and types use the same names."""
    return {field.name: getattr(source, field.name) for field in fields(kind)}


def tokenizer_to_pb(files: types.TokenizerFiles) -> Iterator[target_service_pb2.DownloadTokenizerResponse]:
    """Cut the files into pieces of at most `PIECE_BYTES`; empty files are left out."""
    for file, text in (
        (target_service_pb2.TOKENIZER_FILE_TOKENIZER, files.tokenizer_json),
        (target_service_pb2.TOKENIZER_FILE_CHAT_TEMPLATE, files.chat_template),
        (target_service_pb2.TOKENIZER_FILE_SPECIAL_TOKENS, files.special_tokens_json),
        (target_service_pb2.TOKENIZER_FILE_TOOL_TEMPLATE, files.tool_template),
    ):
        content = text.encode()
        for start in range(0, len(content), PIECE_BYTES):
            yield target_service_pb2.DownloadTokenizerResponse(file=file, content=content[start : start + PIECE_BYTES])


def tokenizer_from_pb(pieces: Iterable[target_service_pb2.DownloadTokenizerResponse]) -> types.TokenizerFiles:
    """Join the pieces of a tokenizer's files. Raise PeerFailed when one is no text."""
    contents: defaultdict[int, bytearray] = defaultdict(bytearray)
    for piece in pieces:
        contents[piece.file] += piece.content
    try:
        return types.TokenizerFiles(
            tokenizer_json=contents[target_service_pb2.TOKENIZER_FILE_TOKENIZER].decode(),
            chat_template=contents[target_service_pb2.TOKENIZER_FILE_CHAT_TEMPLATE].decode(),
            special_tokens_json=contents[target_service_pb2.TOKENIZER_FILE_SPECIAL_TOKENS].decode() or "{}",
            tool_template=contents[target_service_pb2.TOKENIZER_FILE_TOOL_TEMPLATE].decode(),
        )
    except UnicodeDecodeError as error:
        raise PeerFailed("the tokenizer's files are not UTF-8; the peer is not compatible") from error
