"""From a source to a model ready to run: config, weights, tokenizer, end tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from specdec.errors import ConfigError, ModelError, WeightError
from specdec.models.config import ModelConfig, as_id_set, check_architecture, config_from_transformers
from specdec.models.decoder import Decoder
from specdec.models.gguf_file import GgufFile, read_gguf
from specdec.models.sources import resolve_source
from specdec.models.weights import load_weights, open_file, open_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BF16_CAPABILITIES = ("amx_bf16", "avx512_bf16")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run.

    Attributes:
        tokenizer: None where a model folder holds none.
        eos_token_ids: every id that ends a text: of generation config (else config), tokenizer and GGUF file.
        source: as it was asked for.
        dtype: of the weights.
    """

    model: Decoder
    config: ModelConfig
    tokenizer: PreTrainedTokenizerBase | None
    eos_token_ids: frozenset[int]
    source: str
    dtype: torch.dtype


def load_model(
    source: str,
    *,
    dtype: str | torch.dtype = "auto",
    device: torch.device,
    progress: Callable[[str], None] | None = None,
    max_positions: int | None = None,
) -> LoadedModel:
    """Loads a model.

    Args:
        source: `demo`, a hub id, a folder with safetensors, or a `.gguf` file.
        dtype: of the weights and the arithmetic; see `resolve_dtype`.
        device: where the weights go.
        progress: told in words what takes time.
        max_positions: positions lie below this; None takes the model's own limit.

    Raises:
        ModelError: nothing is there, or it cannot be used.
        UnknownArchitectureError: no decoder is built for it.
        WeightError: a tensor is missing, extra, misshapen or not finite, or its file is cut short.
    """
    path = resolve_source(source)
    report = progress or (lambda text: None)
    file = read_gguf(path) if path.is_file() else None
    config = _config(path, file)
    chosen = resolve_dtype(dtype, config, device)
    with torch.device("meta"):
        model = Decoder(config, max_positions)
    report(f"loading {source}: {config.num_parameters / 1e6:.0f} M parameters in {str(chosen).removeprefix('torch.')}")
    if file is None:
        checkpoint = open_folder(path)
        load_weights(model, checkpoint.files, checkpoint.read, dtype=chosen, device=device)
    else:
        _load_gguf(model, file, chosen, device, report)
    model.eval()
    tokenizer = _tokenizer(path, file)
    return LoadedModel(model, config, tokenizer, _eos_ids(path, file, config, tokenizer), source, chosen)


def load_tokenizer(source: str) -> PreTrainedTokenizerBase | None:
    """The tokenizer alone; None where a model folder holds none. Raises ModelError when it cannot be built."""
    path = resolve_source(source, config_only=True)
    return _tokenizer(path, read_gguf(path) if path.is_file() else None)


def inspect_model(source: str) -> ModelConfig:
    """The config alone, for planning memory before weights load. Raises as `load_model` does."""
    path = resolve_source(source, config_only=True)
    return _config(path, read_gguf(path) if path.is_file() else None)


def resolve_dtype(dtype: str | torch.dtype, config: ModelConfig, device: torch.device) -> torch.dtype:
    """The dtype to run in.

    `auto` is bfloat16 where the checkpoint was trained in a 16-bit type and the device multiplies bfloat16 natively, else float32.
    float16 checkpoints run in bfloat16 too: their activations overflow float16 in some models, and CPUs emulate it.

    Raises:
        ConfigError: not a float dtype that the decoder runs in.
    """
    if dtype == "auto":
        native = device.type != "cpu" or any(torch.cpu.get_capabilities().get(name) for name in _BF16_CAPABILITIES)
        return torch.bfloat16 if native and config.torch_dtype in ("bfloat16", "float16") else torch.float32
    chosen = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if chosen not in (torch.float32, torch.bfloat16, torch.float16):
        raise ConfigError(f"dtype must be auto, float32, bfloat16 or float16, got {dtype!r}")
    return chosen


def _config(path: Path, file: GgufFile | None) -> ModelConfig:
    if file is not None:
        from specdec.models.gguf_config import gguf_config

        return gguf_config(file)
    values = _json(path / "config.json")
    check_architecture(values, str(path))
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        hf = AutoConfig.from_pretrained(str(path), local_files_only=True)
    except (ValueError, KeyError, TypeError, OSError, StrictDataclassError) as error:
        raise ModelError(f"{path / 'config.json'}: not a usable config: {error}") from error
    return config_from_transformers(hf, str(path))


def _load_gguf(model: Decoder, file: GgufFile, dtype: torch.dtype, device: torch.device, progress: Callable[[str], None]) -> None:
    """From the conversion cache, which is made again, once, when its file proves damaged."""
    from specdec.models.gguf_weights import converted_weights

    for attempt in (1, 2):
        cached, tensors = converted_weights(file, model.config, dtype, progress)
        if cached is None:
            names = dict.fromkeys(tensors, file.path)
            load_weights(model, names, tensors.__getitem__, dtype=dtype, device=device, check_finite=False)
            return
        try:
            checkpoint = open_file(cached)
            names = dict.fromkeys(checkpoint.files, file.path)
            load_weights(model, names, checkpoint.read, dtype=dtype, device=device, check_finite=False)
            return
        except WeightError as error:
            if attempt == 2 or _is_intact(cached, file, model.config):
                raise
            progress(f"the converted weights at {cached} are damaged ({error}); making them again")
            cached.unlink(missing_ok=True)


def _is_intact(cached: Path, file: GgufFile, config: ModelConfig) -> bool:
    """Whether a cache file holds just the tensors of its GGUF file, so that the fault is the GGUF file's own."""
    from specdec.models.gguf_weights import parameter_shapes

    try:
        checkpoint = open_file(cached)
        return {name: tuple(checkpoint.read(name).shape) for name in checkpoint.files} == parameter_shapes(file, config)
    except WeightError:
        return False


def _tokenizer(path: Path, file: GgufFile | None) -> PreTrainedTokenizerBase | None:
    if file is not None:
        from specdec.models.gguf_tokenizer import gguf_tokenizer

        return gguf_tokenizer(file)
    if not any((path / name).is_file() for name in _TOKENIZER_FILES):
        return None
    from transformers import AutoTokenizer
    from transformers.tokenization_utils_base import VERY_LARGE_INTEGER

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except (ValueError, KeyError, TypeError, OSError, ImportError) as error:
        raise ModelError(f"{path}: the tokenizer cannot be loaded: {error}") from error
    tokenizer.model_max_length = VERY_LARGE_INTEGER  # the engine has the limit; a warning of the tokenizer's own would only confuse
    return tokenizer


def _eos_ids(path: Path, file: GgufFile | None, config: ModelConfig, tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    """A generation config overrides the config, as in transformers; a tokenizer's end token always ends a text."""
    ids = config.eos_token_ids
    if file is not None:
        from specdec.models.gguf_tokenizer import gguf_eos_ids

        ids |= gguf_eos_ids(file)
    elif (path / "generation_config.json").is_file():
        generation = _json(path / "generation_config.json")
        if "eos_token_id" in generation:
            ids = as_id_set(generation["eos_token_id"])
    own = None if tokenizer is None else tokenizer.eos_token_id
    return frozenset(index for index in ids | as_id_set(own) if 0 <= index < config.vocab_size)


def _json(path: Path) -> dict[str, Any]:  # a JSON object
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise ModelError(f"{path}: must hold a JSON object, got {type(values).__name__}")
    return values
