"""The `openai` package of Node as a client of the gateway: client.mjs asks and checks."""

import asyncio
import shutil
from asyncio.subprocess import PIPE
from pathlib import Path

import pytest

from tests.fakes.scripted_generator import ScriptedGenerator, pieces, scripted_url
from tests.tools import missing

FOLDER = Path(__file__).parent / "node"
SHOWN, CALL = "I add. ", '{"a": 1}'
SAID = ("I add", ". ", "<tool_call>", f'{{"name": "add", "arguments": {CALL}}}', "</tool_call>")


@pytest.mark.slow
async def test_nodes_openai_package_reads_models_outputs_calls_and_errors() -> None:
    node = shutil.which("node")
    if node is None or not (FOLDER / "node_modules" / "openai").is_dir():
        missing("Node or its openai package is not installed; scripts/node installs both")
    # It is slow enough that its streams have comments, which are to be skipped.
    async with scripted_url(ScriptedGenerator(pieces(*SAID), pause_s=0.02), silence_s=0.001) as url:
        process = await asyncio.create_subprocess_exec(
            node, str(FOLDER / "client.mjs"), url, "".join(SAID), SHOWN, CALL, stderr=PIPE
        )
        _, complaints = await process.communicate()
    assert process.returncode == 0, complaints.decode()
