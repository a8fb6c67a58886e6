"""Only a model's config and tokenizer files are found and copied, and its code only on request."""

from __future__ import annotations

import json

import pytest

from speculators_vllm_compat.rehearsal import files

CONFIG = {"num_hidden_layers": 2, "auto_map": {"AutoConfig": "code.Config"}, "text_config": {}}


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text('{"auto_map": {}, "eos_token": "x"}')
    (folder / "code.py").write_text("raise SystemExit")
    (folder / "model.safetensors").write_text("540 GB")
    (folder / "model.safetensors.index.json").write_text("{}")
    (folder / "pytorch_model.bin").write_text("540 GB")
    return folder


def copied(source, tmp_path, **arguments):
    target = tmp_path / "target"
    target.mkdir()
    tokenizer = files.copy(source, CONFIG, target, **arguments)
    return tokenizer, {path.name for path in target.iterdir()}, target


def test_no_weights_and_no_code(source, tmp_path):
    tokenizer, names, target = copied(source, tmp_path, trust_remote_code=False)
    assert tokenizer
    assert names == {"config.json", "tokenizer.json", "tokenizer_config.json"}
    assert "auto_map" not in (target / "config.json").read_text()
    assert json.loads((target / "tokenizer_config.json").read_text()) == {"eos_token": "x"}


def test_code_on_request(source, tmp_path):
    _, names, target = copied(source, tmp_path, trust_remote_code=True)
    assert "code.py" in names
    assert json.loads((target / "config.json").read_text()) == CONFIG
    assert not any(name.endswith((".safetensors", ".bin", "index.json")) for name in names)


def test_without_a_tokenizer(source, tmp_path):
    (source / "tokenizer.json").unlink()
    tokenizer, _, _ = copied(source, tmp_path, trust_remote_code=False)
    assert not tokenizer


def test_a_folder_is_found(source):
    assert files.find(str(source)) == source
    assert files.read_config(source) == CONFIG


@pytest.mark.parametrize("name", ["/nowhere/at/all", "./nothing", "a/b/c"])
def test_a_path_that_is_no_folder(name):
    with pytest.raises(
        files.ModelNotFoundError, match="is not a folder; expected a model's folder"
    ):
        files.find(name)


def test_a_folder_without_config(tmp_path):
    with pytest.raises(files.ModelNotFoundError, match=r"has no config\.json; expected"):
        files.find(str(tmp_path))


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_config_that_is_none(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(files.ModelNotFoundError, match="Restore the file"):
        files.read_config(tmp_path)
