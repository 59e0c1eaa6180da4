"""`paceline convert`: checkpoints as they are published, in the form that services load; nothing in them is run."""

import json
import os
import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from sentencepiece import SentencePieceProcessor
from tokenizers import Tokenizer

from paceline.cli.convert import _beside
from paceline.engine.loading import load_model
from paceline.engine.model import weight_files
from paceline.engine.model.checkpoint import find_checkpoint, read_tokenizer
from paceline.engine.model.conversion import convert
from paceline.errors import InvalidRequest, ModelNotUsable, StartupError
from paceline.text import TextCodec
from paceline.types import Text
from tests.checkpoints import edit_json, halve, write_model
from tests.commands import paceline_here
from tests.published_forms import write_pair, write_pickled, write_sentencepiece

pytestmark = pytest.mark.review  # D7
WEIGHTS = "pytorch_model.bin"


@pytest.fixture(scope="module")
def vicuna(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Write the target and the draft of the pair as published."""
    return write_pair(tmp_path_factory.mktemp("published"), "vicuna")


@pytest.fixture(scope="module")
def converted(vicuna: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("converted") / "target"
    convert(str(vicuna[0]), folder)
    return folder


@pytest.fixture
def draft(vicuna: tuple[Path, Path], tmp_path: Path) -> Path:
    """Copy the published draft, which has a single file of weights."""
    return Path(shutil.copytree(vicuna[1], tmp_path / "draft"))


def tensors_of(folder: Path, pattern: str = "*.safetensors") -> dict[str, torch.Tensor]:
    read = load_file if pattern.endswith("safetensors") else torch.load
    return {name: one for file in sorted(folder.glob(pattern)) for name, one in read(file).items()}


def same_tensors(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        tensor.dtype == other[name].dtype and torch.equal(tensor, other[name]) for name, tensor in one.items()
    )


def test_what_is_not_converted_is_refused_with_the_command_that_converts_it(
    vicuna: tuple[Path, Path], converted: Path, tmp_path: Path
) -> None:
    with pytest.raises(ModelNotUsable, match=f"`paceline convert {vicuna[0]}` writes a checkpoint that can be loaded"):
        load_model(str(vicuna[0]))
    half = Path(shutil.copytree(converted, tmp_path / "its half"))
    (half / "tokenizer.json").unlink()
    with pytest.raises(ModelNotUsable, match=r"sentencepiece form alone .*; `paceline convert '/.*its half'`"):
        load_model(str(half))


def test_every_tensor_is_kept_with_its_dtype(vicuna: tuple[Path, Path], converted: Path) -> None:
    assert same_tensors(tensors_of(converted), tensors_of(vicuna[0], "pytorch_model-*.bin"))
    assert load_model(str(converted)).description.dtype == "float16"


@pytest.mark.parametrize("is_of_today", [True, False])
def test_weights_are_the_same_in_however_many_files_and_when_two_names_share_them(
    is_of_today: bool, draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before torch 1.6 files were no archives, and are read another way."""
    tensors = tensors_of(draft, WEIGHTS)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    tensors["model.layers.1.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"].T.contiguous().T
    edit_json(draft / "config.json", tie_word_embeddings=True)
    torch.save(tensors, draft / WEIGHTS, _use_new_zipfile_serialization=is_of_today)
    convert(str(draft), tmp_path / "whole")
    monkeypatch.setattr(weight_files, "SHARD_BYTES", 50_000)
    convert(str(draft), tmp_path / "parts")
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 2
    assert same_tensors(tensors_of(tmp_path / "whole"), tensors)
    assert same_tensors(tensors_of(tmp_path / "parts"), tensors)
    assert load_model(str(tmp_path / "parts")).description.parameter_count < sum(
        one.numel() for one in tensors.values()
    )


def test_only_a_tokenizer_is_converted_where_weights_are_in_safetensors(converted: Path, tmp_path: Path) -> None:
    half = Path(shutil.copytree(converted, tmp_path / "half"))
    (half / "tokenizer.json").unlink()
    edit_json(half / "tokenizer_config.json", tokenizer_class="LlamaTokenizer")
    done = convert(str(half), tmp_path / "whole")
    assert (done.tensor_count, done.compared_texts > 100) == (0, True)
    assert tensors_of(tmp_path / "whole").keys() == tensors_of(converted).keys()
    ours, theirs = (load_model(str(folder)).description for folder in (tmp_path / "whole", converted))
    assert ours.weights_digest == theirs.weights_digest


class Exploit:
    """Runs a command when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.command = f"touch {file}"

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


@pytest.mark.parametrize("is_of_today", [True, False])
def test_a_pickle_that_would_run_code_is_refused_and_runs_none(is_of_today: bool, draft: Path, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    tensors = {"model.norm.weight": torch.ones(3), "x": Exploit(ran)}
    torch.save(tensors, draft / WEIGHTS, _use_new_zipfile_serialization=is_of_today)
    with pytest.raises(
        ModelNotUsable,
        match=r"is refused, because it asks for \w+\.system, which makes no tensor; nothing of it was run",
    ):
        convert(str(draft), tmp_path / "new")
    assert not ran.exists()
    assert not (tmp_path / "new").exists()
    (draft / WEIGHTS).write_bytes(pickle.dumps(Exploit(ran), protocol=2))
    with pytest.raises(ModelNotUsable, match=WEIGHTS):
        convert(str(draft), tmp_path / "new")
    assert not ran.exists()


def lose_a_shard(folder: Path) -> None:
    write_pickled(folder, tensors_of(folder, WEIGHTS), 2)
    (folder / WEIGHTS).unlink()
    (folder / "pytorch_model-00001-of-00002.bin").unlink()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: halve(folder / WEIGHTS), "cannot be read, perhaps half written"),
        (lambda folder: (folder / WEIGHTS).write_bytes(b""), "perhaps half written: it is empty"),
        (lambda folder: torch.save([torch.ones(3)], folder / WEIGHTS), "holds something other than named tensors"),
        (lambda folder: torch.save({}, folder / WEIGHTS), "holds something other than named tensors"),
        (lambda folder: torch.save({"step": 5}, folder / WEIGHTS), "holds something other than named tensors"),
        (lose_a_shard, "pytorch_model-00001-of-00002.bin cannot be read"),
        (lambda folder: (folder / WEIGHTS).unlink(), "neither safetensors nor pytorch_model.bin"),
        (lambda folder: edit_json(folder / "config.json", architectures=["T5Model"]), "architecture T5Model"),
        (lambda folder: (folder / "tokenizer.model").write_bytes(b"half"), "tokenizer.model cannot be converted"),
        (lambda folder: (folder / "tokenizer_config.json").write_text("{half"), "tokenizer.model cannot be converted"),
    ],
)
def test_what_cannot_be_converted_is_refused_by_name_and_leaves_nothing(
    damage: Callable[[Path], Any], words: str, draft: Path, tmp_path: Path
) -> None:
    damage(draft)
    with pytest.raises(ModelNotUsable) as refusal:
        convert(str(draft), tmp_path / "new")
    assert words in refusal.value.message
    assert str(draft) in refusal.value.message
    assert [one.name for one in tmp_path.iterdir()] == ["draft"]


@pytest.mark.filterwarnings("ignore")  # torch is about to drop some of them
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.quantize_per_tensor(torch.ones(2, 2), 0.1, 0, torch.qint8),
        lambda: torch.eye(2).to_sparse(),
        lambda: torch.eye(2).to_sparse_csr(),
        lambda: torch.ones(2, dtype=torch.complex128),
        lambda: torch.empty(2, device="meta"),
    ],
    ids=["quantised", "sparse", "rows", "complex", "none"],
)
def test_tensors_that_safetensors_does_not_hold_are_refused_by_name(
    make: Callable[[], torch.Tensor], draft: Path, tmp_path: Path
) -> None:
    torch.save(tensors_of(draft, WEIGHTS) | {"model.odd.weight": make()}, draft / WEIGHTS)
    with pytest.raises(ModelNotUsable, match=r"model\.odd\.weight in pytorch_model\.bin is quantised, sparse or"):
        convert(str(draft), tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("is_of_today", [True, False])
def test_pickled_weights_are_refused_in_words_wherever_they_break_off(
    is_of_today: bool, draft: Path, tmp_path: Path
) -> None:
    file = draft / WEIGHTS
    torch.save({"model.norm.weight": torch.ones(8)}, file, _use_new_zipfile_serialization=is_of_today)
    whole = file.read_bytes()
    for size in range(1, len(whole), 7):
        file.write_bytes(whole[:size])
        with pytest.raises(ModelNotUsable, match="cannot be read, perhaps half written|asks for"):
            convert(str(draft), tmp_path / "new")


def test_what_is_converted_can_be_changed_where_the_checkpoint_cannot(draft: Path, tmp_path: Path) -> None:
    """Its tokenizer's configuration is changed at once, which fails for all but root in a file without that right."""
    for file in draft.iterdir():
        file.chmod(0o444)
    convert(str(draft), tmp_path / "new")
    assert all(file.stat().st_mode & 0o200 for file in (tmp_path / "new").iterdir())


@pytest.mark.parametrize(
    ("model", "folder"),
    [
        ("lmsys/vicuna", "vicuna-safetensors"),
        ("lmsys/vicuna@main", "vicuna@main-safetensors"),
        ("lmsys/vicuna@refs/pr/1", "vicuna@refs-pr-1-safetensors"),
    ],
)
def test_a_new_folder_has_the_models_name_whatever_its_revision(model: str, folder: str) -> None:
    assert _beside(model) == Path(folder)


def test_names_that_no_folder_can_have_are_refused_with_words(draft: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="cannot be written: .*File name too long"):
        convert(str(draft), tmp_path / ("x" * 300))
    assert _beside("x" * 300) == Path("x" * 300 + "-safetensors")


def test_nothing_is_overwritten_and_nothing_converted_twice(converted: Path, draft: Path, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    with pytest.raises(InvalidRequest, match="there is there already; name a new folder"):
        convert(str(draft), tmp_path / "there")
    assert not list((tmp_path / "there").iterdir())
    with pytest.raises(InvalidRequest, match="needs no conversion"):
        convert(str(converted), tmp_path / "new")


def test_the_checkpoints_code_and_other_forms_stay_behind(draft: Path, tmp_path: Path) -> None:
    for name in ("modeling.py", "training_args.bin", "model.msgpack", ".paceline-digests.json"):
        (draft / name).write_text("{}")
    (draft / "LICENSE").write_text("free")
    convert(str(draft), tmp_path / "new")
    kept = {"LICENSE", "config.json", "generation_config.json", "special_tokens_map.json", "tokenizer.model"}
    made = {
        "model-00001-of-00001.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert {one.name for one in (tmp_path / "new").iterdir()} == kept | made
    assert len({one.stat().st_mode for one in (tmp_path / "new").iterdir()}) == 1


def test_a_template_for_conversations_with_tools_comes_along(draft: Path, tmp_path: Path) -> None:
    (draft / "chat_template.jinja").write_text("of all")
    (draft / "additional_chat_templates").mkdir()
    (draft / "additional_chat_templates" / "tool_use.jinja").write_text("with tools")
    convert(str(draft), tmp_path / "new")
    files = read_tokenizer(find_checkpoint(str(tmp_path / "new")))
    assert files and (files.chat_template, files.tool_template) == ("of all", "with tools")


def codec_of(folder: Path) -> TextCodec:
    files = read_tokenizer(find_checkpoint(str(folder)))
    assert files
    return TextCodec(files)


def test_a_converted_tokenizer_is_read_as_sentencepiece_reads_it(vicuna: tuple[Path, Path], converted: Path) -> None:
    original = SentencePieceProcessor(model_file=str(vicuna[0] / "tokenizer.model"))
    codec = codec_of(converted)
    assert codec.encode(Text("  hello")) == [original.bos_id(), *original.encode("  hello")]
    assert codec.tokenizer.token_to_id("</s>") == original.eos_id()
    texts = st.text(st.sampled_from("aeht  ▁\n\t.,0169Zé漢🙂\u0301\u00a0\u3000/_") | st.characters(codec="utf-8"))
    special = ("<s>", "</s>", "<unk>")

    @given(texts.filter(lambda text: not any(one in text for one in special)))
    def equal(text: str) -> None:
        ids = original.encode(text)
        assert codec.tokenizer.encode(text, add_special_tokens=False).ids == ids
        assert codec.tokenizer.decode(ids) == original.decode(ids)

    equal()


def test_a_tokenizer_that_states_the_later_form_keeps_it(draft: Path, tmp_path: Path) -> None:
    """`legacy: false`, as vicuna-7b-v1.5 has it: no space begins the text after a special token."""
    original = SentencePieceProcessor(model_file=str(draft / "tokenizer.model"))
    text = "</s>the work"
    convert(str(draft), tmp_path / "old")
    edit_json(draft / "tokenizer_config.json", legacy=False)
    convert(str(draft), tmp_path / "new")
    old, new = (codec_of(tmp_path / name).encode(Text(text))[2:] for name in ("old", "new"))
    assert old == original.encode("the work")
    assert original.decode(new) == "the work"
    assert new != old


@pytest.mark.parametrize(
    "settings",
    [{"normalization_rule_name": "nmt_nfkc"}, {"remove_extra_whitespaces": True}, {"add_dummy_prefix": False}],
)
def test_a_tokenizer_that_would_tokenize_otherwise_is_refused(
    settings: dict[str, Any], draft: Path, tmp_path: Path
) -> None:
    write_sentencepiece(draft, **settings)
    with pytest.raises(ModelNotUsable, match=r"tokenizer.model makes \[.* and converted it would make \["):
        convert(str(draft), tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_the_command_says_what_it_did_and_where_the_result_is(draft: Path) -> None:
    status, out, err = paceline_here("convert", str(draft))
    assert (status, err) == (0, "")
    place = draft.with_name("draft-safetensors")
    assert "22 tensors, 0.00 GiB of float16, float32" in out
    assert "equal to sentencepiece on 279 texts" in out
    assert "none: prompts are sent as they are" in out
    assert f"--draft-model {place}" in out
    assert load_model(str(place)).description.architecture == "LlamaForCausalLM"
    status, _, err = paceline_here("convert", str(draft))
    assert status == 1
    assert "is there already" in err


def test_without_sentencepiece_the_extra_is_named_and_nothing_written(
    draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    monkeypatch.delitem(sys.modules, "paceline.engine.model.sentencepiece_form", raising=False)
    status, _, err = paceline_here("convert", str(draft), "--output", str(tmp_path / "new"))
    assert status == 1
    assert err == "paceline: this needs sentencepiece, which is not installed: pip install 'paceline[convert]'\n"
    assert [one.name for one in tmp_path.iterdir()] == ["draft"]


def test_a_conversion_that_memory_does_not_hold_says_so(
    draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*_: Any, **__: Any) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(torch, "load", no_memory)
    with pytest.raises(StartupError, match="takes more memory than there is"):
        convert(str(draft), tmp_path / "new")


def test_added_tokens_beyond_the_vocabulary_keep_their_ids(tmp_path: Path) -> None:
    write_model(tmp_path / "one", "Llama", vocab_size=520)
    write_pickled(tmp_path / "one", tensors_of(tmp_path / "one"), 1)
    (tmp_path / "one" / "model.safetensors").unlink()
    write_sentencepiece(tmp_path / "one")
    (tmp_path / "one" / "added_tokens.json").write_text(json.dumps({"<pad>": 512}))
    convert(str(tmp_path / "one"), tmp_path / "new")
    tokenizer = Tokenizer.from_file(str(tmp_path / "new" / "tokenizer.json"))
    assert tokenizer.token_to_id("<pad>") == 512
