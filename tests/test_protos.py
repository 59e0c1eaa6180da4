"""The wire's definitions as others use them."""

from importlib.resources import files
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.rpc import status_pb2
from grpc_tools import protoc

PROTOS = Path(__file__).parent.parent / "protos"


@pytest.mark.review
def test_the_protos_need_nothing_beside_themselves_and_what_every_compiler_brings(tmp_path: Path) -> None:
    """review G10"""
    sources = [str(path) for path in sorted(PROTOS.rglob("*.proto"))]
    image = tmp_path / "image.binpb"
    well_known = files("grpc_tools") / "_proto"
    assert protoc.main(["protoc", f"-I{PROTOS}", f"-I{well_known}", f"--descriptor_set_out={image}", *sources]) == 0
    # The copy says what the library that is used here says.
    made = FileDescriptorSet.FromString(image.read_bytes()).file
    copied = next(one for one in made if one.name == "google/rpc/status.proto").message_type[0]
    assert {one.name: (one.number, one.type) for one in copied.field} == {
        one.name: (one.number, one.type) for one in status_pb2.Status.DESCRIPTOR.fields
    }
