"""Models of the hub: revisions, tokens, and what works without a network."""

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import snapshot_download

from paceline.engine.loading import load_model
from paceline.engine.model import hub
from paceline.engine.model.conversion import convert
from paceline.errors import ModelNotUsable
from tests.commands import python_code
from tests.conftest import PairOfCheckpoints
from tests.fakes.hub import FakeHub, serving
from tests.published_forms import write_pair

pytestmark = pytest.mark.review  # D7

OLD, NEW = "a" * 40, "b" * 40
TOKEN = "hf_of_a_test"
Ask = Callable[[str], None]


@pytest.fixture
def served(pairs: dict[str, PairOfCheckpoints]) -> Iterator[FakeHub]:
    """Serve a repository of two commits, which are Llama's target and draft, and a private one."""
    pair = pairs["Llama"]
    commits = {"tiny/model": {OLD: pair.target, NEW: pair.draft}, "tiny/private": {NEW: pair.target}}
    with serving(FakeHub(commits, {"main": NEW, "v1.0": OLD}, {"tiny/private": TOKEN})) as running:
        yield running


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ask:
    """Return what makes this process ask another hub. The library reads its variables when it is imported."""
    asked = partial(snapshot_download, cache_dir=tmp_path / "cache", token=False)
    return lambda url: monkeypatch.setattr(hub, "snapshot_download", partial(asked, endpoint=url))


def origin(model: str) -> tuple[str, str, str]:
    found = load_model(model).description
    return found.model_id, found.revision, found.weights_digest


def loaded(cache: Path, *models: str, **variables: str) -> list[Any]:
    """Find models in a process of its own, by variables. Return each one's commit, or why it cannot be used."""
    program = (
        "import sys\n"
        "from paceline.engine.model.hub import folder_of\n"
        "from paceline.errors import ModelNotUsable\n"
        "for model in sys.argv[1:]:\n"
        "    try:\n"
        "        print(folder_of(model, ['*']).name)\n"
        "    except ModelNotUsable as error:\n"
        "        print(error.message)\n"
    )
    status, out, err = python_code(program, *models, HF_HOME=str(cache), HF_HUB_DISABLE_PROGRESS_BARS="1", **variables)
    assert status == 0, err
    return out.splitlines()


def test_a_revision_is_a_branch_a_tag_or_a_commit_and_the_description_tells_the_commit(
    served: FakeHub, ask: Ask, pairs: dict[str, PairOfCheckpoints]
) -> None:
    ask(served.url)
    old, new = (origin(str(folder))[2] for folder in (pairs["Llama"].target, pairs["Llama"].draft))
    for name, commit, digest in [("", NEW, new), ("@main", NEW, new), ("@v1.0", OLD, old), (f"@{OLD}", OLD, old)]:
        assert origin(f"tiny/model{name}") == (f"tiny/model{name}", commit, digest)
    # What the cache has is not fetched again.
    assert served.fetched.count("model.safetensors") == 2
    with pytest.raises(ModelNotUsable, match="'tiny/model@v2.0' is no directory here and cannot be had") as refusal:
        load_model("tiny/model@v2.0")
    assert "HF_TOKEN" not in refusal.value.message
    ask("http://127.0.0.1:1")
    assert origin(f"tiny/model@{OLD}")[1] == OLD


def test_pickled_weights_are_fetched_to_be_converted_and_for_nothing_else(ask: Ask, tmp_path: Path) -> None:
    published, _ = write_pair(tmp_path / "published", "vicuna")
    (published / "modeling.py").write_text("raise SystemExit")
    with serving(FakeHub({"tiny/vicuna": {NEW: published}}, {"v1.3": NEW})) as running:
        ask(running.url)
        with pytest.raises(ModelNotUsable, match="`paceline convert tiny/vicuna@v1.3` writes a checkpoint"):
            load_model("tiny/vicuna@v1.3")
        assert not [file for file in running.fetched if file.endswith(".bin")]
        convert("tiny/vicuna@v1.3", tmp_path / "new")
        assert len([file for file in running.fetched if file.endswith(".bin")]) == 2
        assert "modeling.py" not in running.fetched
    assert load_model(str(tmp_path / "new")).description.dtype == "float16"


def test_weights_that_a_repository_has_twice_are_fetched_once(
    ask: Ask, pairs: dict[str, PairOfCheckpoints], tmp_path: Path
) -> None:
    """Mistral's have them in their own form too: 24 GB more for a model of 12 billion parameters."""
    published = Path(shutil.copytree(pairs["Llama"].target, tmp_path / "published"))
    (published / "consolidated.safetensors").write_bytes(b"the same weights by other names")
    with serving(FakeHub({"tiny/model": {NEW: published}}, {"main": NEW})) as running:
        ask(running.url)
        load_model("tiny/model")
        assert "model.safetensors" in running.fetched
        assert "consolidated.safetensors" not in running.fetched


def test_a_private_repository_is_refused_with_the_name_of_the_tokens_variable(served: FakeHub, ask: Ask) -> None:
    ask(served.url)
    with pytest.raises(
        ModelNotUsable, match="cannot be had from the hub: .*; if it is private or gated, set HF_TOKEN$"
    ):
        load_model("tiny/private")


@pytest.mark.slow
def test_a_token_comes_from_a_variable_or_a_file_and_offline_needs_none(served: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    online = loaded(tmp_path / "one", "tiny/private", "tiny/model@v1.0", HF_ENDPOINT=served.url, HF_TOKEN=TOKEN)
    by_file = loaded(tmp_path / "two", "tiny/private", HF_ENDPOINT=served.url, HF_TOKEN_PATH=str(tmp_path / "token"))
    assert (online, by_file) == ([NEW, OLD], [NEW])
    served.fetched.clear()
    named = ["tiny/private", "tiny/model@v1.0", "tiny/model@main", "tiny/other"]
    offline = loaded(tmp_path / "one", *named, HF_ENDPOINT=served.url, HF_HUB_OFFLINE="1")
    assert offline[:2] == online
    assert all("cannot be had from the hub" in words for words in offline[2:])
    assert served.fetched == []


def test_a_directory_wins_over_a_hub_id_of_its_name(
    pairs: dict[str, PairOfCheckpoints], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(pairs["Llama"].target, tmp_path / "tiny" / "model@v1")
    monkeypatch.setattr(hub, "snapshot_download", None)
    assert load_model("tiny/model@v1").description.model_id == "tiny/model@v1"


@pytest.mark.parametrize(
    "model", ["tiny/model@", "tiny/model@a b", "tiny@v1", "@v1", "a/b/c@v1", "tiny/model@-v1 ", "x" * 300]
)
def test_what_is_neither_a_directory_nor_a_hub_id_is_refused(model: str) -> None:
    with pytest.raises(ModelNotUsable, match=r"is not a directory; give .* with a revision if you like: Qwen/"):
        load_model(model)
