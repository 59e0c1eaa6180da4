"""Translate model descriptions and tokenizer files."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import fields

from paceline import types
from paceline.v1 import common_pb2, target_service_pb2

PIECE_BYTES = 1 << 20


def model_to_pb(model: types.ModelDescription) -> common_pb2.ModelDescription:
    return common_pb2.ModelDescription(**{field.name: getattr(model, field.name) for field in fields(model)})


def model_from_pb(message: common_pb2.ModelDescription) -> types.ModelDescription:
    values = {field.name: getattr(message, field.name) for field in fields(types.ModelDescription)}
    return types.ModelDescription(**values | {"end_token_ids": tuple(message.end_token_ids)})


def tokenizer_to_pb(files: types.TokenizerFiles) -> Iterator[target_service_pb2.DownloadTokenizerResponse]:
    """Cut the files into pieces of at most `PIECE_BYTES`; empty files are left out."""
    for file, text in (
        (target_service_pb2.TOKENIZER_FILE_TOKENIZER, files.tokenizer_json),
        (target_service_pb2.TOKENIZER_FILE_CHAT_TEMPLATE, files.chat_template),
        (target_service_pb2.TOKENIZER_FILE_SPECIAL_TOKENS, files.special_tokens_json),
    ):
        content = text.encode()
        for start in range(0, len(content), PIECE_BYTES):
            yield target_service_pb2.DownloadTokenizerResponse(file=file, content=content[start : start + PIECE_BYTES])


def tokenizer_from_pb(pieces: Iterable[target_service_pb2.DownloadTokenizerResponse]) -> types.TokenizerFiles:
    contents: defaultdict[int, bytearray] = defaultdict(bytearray)
    for piece in pieces:
        contents[piece.file] += piece.content
    return types.TokenizerFiles(
        tokenizer_json=contents[target_service_pb2.TOKENIZER_FILE_TOKENIZER].decode(),
        chat_template=contents[target_service_pb2.TOKENIZER_FILE_CHAT_TEMPLATE].decode(),
        special_tokens_json=contents[target_service_pb2.TOKENIZER_FILE_SPECIAL_TOKENS].decode() or "{}",
    )
