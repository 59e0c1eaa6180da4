"""The wire's definitions as other tools use them."""

import re
import shutil
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.rpc import status_pb2
from grpc_tools import protoc

from paceline.checks import MAX_DRAFT_COUNT, MAX_FURTHER_COUNT, MAX_PREPARED_COUNT, MAX_PROPOSED_COUNT

PROTOS = Path(__file__).parents[2] / "protos"


@pytest.mark.review
def test_the_protos_need_nothing_beside_themselves_and_what_every_compiler_brings(tmp_path: Path) -> None:
    """review G10"""
    sources = [str(path) for path in sorted(PROTOS.rglob("*.proto"))]
    image = tmp_path / "image.binpb"
    well_known = files("grpc_tools") / "_proto"
    assert protoc.main(["protoc", f"-I{PROTOS}", f"-I{well_known}", f"--descriptor_set_out={image}", *sources]) == 0
    # The copy equals the installed library's.
    made = FileDescriptorSet.FromString(image.read_bytes()).file
    copied = next(one for one in made if one.name == "google/rpc/status.proto").message_type[0]
    assert {one.name: (one.number, one.type) for one in copied.field} == {
        one.name: (one.number, one.type) for one in status_pb2.Status.DESCRIPTOR.fields
    }


def breaks(protos: Path) -> str:
    """Return the breaks of the released wire, in words."""
    command = [
        str(Path(sys.executable).with_name("buf")),
        "breaking",
        str(protos.parent),
        "--against",
        str(PROTOS / "released.txtpb"),
    ]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True).stdout


@pytest.mark.review
def test_the_wire_keeps_what_was_released(tmp_path: Path) -> None:
    """review D10"""
    shutil.copytree(PROTOS, tmp_path / "protos")
    shutil.copy(PROTOS.parent / "buf.yaml", tmp_path)
    assert breaks(tmp_path / "protos") == ""
    target = tmp_path / "protos" / "paceline" / "v1" / "target_service.proto"
    released = target.read_text()
    target.write_text(released.replace("rpc VerifyTokens(stream", "rpc VerifyTokens("))
    assert "changed from client streaming to client unary" in breaks(tmp_path / "protos")
    target.write_text(released.replace("token_ids = 3", "token_ids = 30"))
    assert 'field "3" with name "token_ids"' in breaks(tmp_path / "protos")


@pytest.mark.parametrize(
    ("service", "field", "most"),
    [
        ("draft", "draft_count", MAX_PROPOSED_COUNT),
        ("draft", "prepare_count", MAX_PREPARED_COUNT),
        ("target", "propose_count", MAX_DRAFT_COUNT),
        ("target", "further_count", MAX_FURTHER_COUNT),
    ],
)
def test_a_fields_comment_tells_the_most_that_its_service_takes(service: str, field: str, most: int) -> None:
    """Of further rounds it told no bound, and a request for nine was refused."""
    protos = (PROTOS / f"paceline/v1/{service}_service.proto").read_text()
    found = re.search(rf"((?: +//.*\n)+) +int32 {field} = ", protos)
    assert found and re.search(rf"[01] to {most}\b", found[1])
