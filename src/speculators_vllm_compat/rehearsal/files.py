"""A model's config and tokenizer files, found and copied. Nothing else of it is ever read."""

from __future__ import annotations

import importlib
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .layers import Config

_TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tekken.json",
    "tiktoken.model",
    "chat_template.json",
    "chat_template.jinja",
    "*.tiktoken",
)
_CONFIG = (
    "configuration.json",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
# One of these makes a tokenizer; the others only tell more of it.
_MAKES_TOKENIZER = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
    "*.tiktoken",
    "tiktoken.model",
)
# Keys by which a model's own Python code is found.
_REMOTE = "auto_map"


class ModelNotFoundError(ValueError):
    """There is no config of that model on this machine."""


def find(model: str) -> Path:
    """The folder with a model's config: a local one, or the hub cache's.

    Raises:
        ModelNotFoundError: Neither is there, or the folder has no config.json.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelNotFoundError(
                f"{folder} has no config.json; expected a model's folder. Name the folder that "
                "holds it."
            )
        return folder
    if folder.exists() or model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise ModelNotFoundError(
            f"{model} is not a folder; expected a model's folder, with its config.json, or the id "
            "of a cached one."
        )
    cached = _cached(model)
    if cached is None:
        raise ModelNotFoundError(
            f"{model} is neither a folder nor in the hub cache, and nothing is downloaded. Fetch "
            f'its small files first: hf download {model} --include "*.json" "tokenizer*"'
        )
    return cached


def _cached(model: str) -> Path | None:
    try:
        hub = importlib.import_module("huggingface_hub")  # comes with transformers
    except ImportError:
        return None
    try:
        found = hub.try_to_load_from_cache(model, "config.json")
    except ValueError as error:  # not an id
        raise ModelNotFoundError(f"{model}: {error}. Expected a folder or a hub id.") from error
    return Path(found).parent if isinstance(found, str) else None


def read_config(folder: Path) -> Config:
    """A model's config.json.

    Raises:
        ModelNotFoundError: It is not a JSON object.
    """
    path = folder / "config.json"
    try:
        config: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelNotFoundError(
            f"{path} cannot be read as JSON ({error}); expected a model's config. Restore the file."
        ) from error
    if not isinstance(config, dict):
        raise ModelNotFoundError(
            f"{path} holds a {type(config).__name__}; expected a JSON object. Restore the file."
        )
    return config


def copy(source: Path, config: Config, target: Path, *, trust_remote_code: bool) -> bool:
    """Copy what a miniature needs; returns whether a tokenizer was there.

    The model's own code is copied only on request: the generator runs whatever it finds.
    """
    patterns = (*_TOKENIZER, *_CONFIG, *(("*.py",) if trust_remote_code else ()))
    for pattern in patterns:
        for path in source.glob(pattern):
            if path.is_file():
                shutil.copyfile(path, target / path.name)
    if not trust_remote_code:
        config = without_code(config)
        _untrust(target / "tokenizer_config.json")
    (target / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    return any(any(target.glob(pattern)) for pattern in _MAKES_TOKENIZER)


def without_code(config: Config) -> Config:
    """The config without its references to the model's own code."""
    return {
        key: without_code(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if key != _REMOTE
    }


def _untrust(path: Path) -> None:
    if path.is_file():
        settings = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(json.dumps(without_code(settings)), encoding="utf-8")
