"""Where models lie: turns `demo`, a hub id, a folder or a file into a local path."""

from __future__ import annotations

import re
from pathlib import Path

from specdec.config import DEMO_MODEL
from specdec.errors import ModelError

CONFIG_FILES = ("*.json", "*.jinja", "*.txt", "tokenizer.model")
WEIGHT_FILES = ("*.safetensors",)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


def resolve_source(source: str, *, config_only: bool = False) -> Path:
    """A folder with config.json, or a GGUF file.

    Args:
        source: `demo`, a folder, a file, or a hub id, looked for in that order and downloaded where it is one.
        config_only: of a hub id, fetch no weights.

    Raises:
        ModelError: nothing is there; the message says what to do.
    """
    if source == DEMO_MODEL:
        from specdec.models.demo import demo_path  # also a program of its own, which must not be imported beforehand

        path = demo_path()
        if not path.exists():
            raise ModelError(f"the demo model is not at {path}; `make setup` or `python -m specdec.models.demo` fetches it")
        return path
    path = Path(source).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"{path}: holds no config.json; a model folder has one beside its safetensors files")
        return path
    if path.is_file():
        return path
    if path.suffix == ".gguf" or path.is_absolute() or source.startswith((".", "~")) or not _HUB_ID.fullmatch(source):
        raise ModelError(f"{source}: no such file or folder")
    return _download(source, (*CONFIG_FILES, *(() if config_only else WEIGHT_FILES)))


def _download(hub_id: str, patterns: tuple[str, ...]) -> Path:
    import httpx
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(hub_id, allow_patterns=list(patterns)))
    except (OSError, ValueError, httpx.HTTPError) as error:  # hub errors are OSErrors or ValueErrors
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ModelError(
            f"{hub_id}: no such file or folder here, and not to be had from the model hub ({reason}); "
            "give a folder or a .gguf file, or check the id and the connection (HF_HUB_OFFLINE, HF_ENDPOINT, HF_TOKEN)"
        ) from error
    if not (folder / "config.json").is_file():
        raise ModelError(f"{hub_id}: the hub repository holds no config.json; download one of its files and give its path")
    return folder
