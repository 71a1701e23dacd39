"""From a source to a model ready to run: config, weights, tokenizer, end tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specdec.errors import ModelError, WeightError
from specdec.models import converted
from specdec.models.config import ModelConfig, as_id_set, check_architecture, config_from_transformers
from specdec.models.converted import Conversion, cached_path, convert_in_memory, write_converted
from specdec.models.decoder import Decoder
from specdec.models.gguf_file import GgufFile, read_gguf
from specdec.models.huge_pages import read_into_huge_pages
from specdec.models.precision import Precision, resolve_precision
from specdec.models.sources import resolve_source
from specdec.models.weights import Checkpoint, SafetensorsFiles, check_names, load_tensors, open_file, open_folder, wanted_tensors
from specdec.quantization.layers import quantize_linears

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


@dataclass(frozen=True)
class ModelSource:
    """A model found, its weights not yet read.

    Attributes:
        name: as it was asked for.
        path: a folder with config.json, or a GGUF file.
        file: the GGUF file, opened.
    """

    name: str
    path: Path
    file: GgufFile | None
    config: ModelConfig

    def precision(self, dtype: str | torch.dtype, device: torch.device) -> Precision:
        """What to run it in. Raises ConfigError as `resolve_precision` does."""
        four_bit: frozenset[str] = frozenset()
        if self.file is not None:
            from specdec.models.gguf_weights import GgufWeights

            four_bit = GgufWeights(self.file, self.config).four_bit_layers()
        return resolve_precision(dtype, self.config, device, four_bit=four_bit)


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run.

    Attributes:
        tokenizer: None where a model folder holds none.
        eos_token_ids: every id that ends a text: of generation config (else config), tokenizer and GGUF file.
        source: as it was asked for.
        precision: in what it is kept and computed.
    """

    model: Decoder
    config: ModelConfig
    tokenizer: PreTrainedTokenizerBase | None
    eos_token_ids: frozenset[int]
    source: str
    precision: Precision

    @property
    def weights(self) -> str:
        """`int8`, `int4` or the name of a float type."""
        return self.precision.weights

    @property
    def dtype(self) -> torch.dtype:
        """Of activations between the products."""
        return self.precision.dtype

    @property
    def kv_dtype(self) -> torch.dtype:
        """Of its KV pool."""
        return self.precision.kv_dtype


def open_model(source: str) -> ModelSource:
    """Finds a model and reads its config, for planning memory before weights load. Raises as `load_model` does."""
    path = resolve_source(source, config_only=True)
    file = read_gguf(path) if path.is_file() else None
    return ModelSource(source, path, file, _config(path, file))


def load_model(
    source: str | ModelSource,
    *,
    dtype: str | torch.dtype = "auto",
    device: torch.device,
    progress: Callable[[str], None] | None = None,
    max_positions: int | None = None,
) -> LoadedModel:
    """Loads a model.

    Args:
        source: `demo`, a hub id, a folder with safetensors, or a `.gguf` file; or what `open_model` made of one.
        dtype: of the weights and the arithmetic; see `resolve_precision`.
        device: where the weights go.
        progress: told in words what takes time.
        max_positions: positions lie below this; None takes the model's own limit.

    Raises:
        ModelError: nothing is there, or it cannot be used.
        UnknownArchitectureError: no decoder is built for it.
        WeightError: a tensor is missing, extra, misshapen or not finite, or its file is cut short.
    """
    found = open_model(source) if isinstance(source, str) else source
    name, file, config = found.name, found.file, found.config
    path = found.path if file is not None else resolve_source(name)  # of a hub id, now with its weights
    report = progress or (lambda text: None)
    precision = found.precision(dtype, device)
    report(f"loading {name}: {config.num_parameters / 1e6:.0f} M parameters in {precision.weights}")
    if file is None:
        checkpoint: Checkpoint = open_folder(path)
    else:
        from specdec.models.gguf_weights import GgufWeights

        checkpoint = GgufWeights(file, config)
    check_names(wanted_tensors(blank_model(config)), checkpoint)
    model = blank_model(config, precision, max_positions)
    wanted = wanted_tensors(model)
    if isinstance(checkpoint, SafetensorsFiles) and not precision.quantized:
        load_tensors(model, wanted, checkpoint.read, device)
    else:
        _load_converted(model, Conversion(checkpoint, path, precision, wanted, config.tie_word_embeddings), device, report)
    model.eval()
    tokenizer = _tokenizer(path, file)
    return LoadedModel(model, config, tokenizer, _eos_ids(path, file, config, tokenizer), name, precision)


def blank_model(config: ModelConfig, precision: Precision | None = None, max_positions: int | None = None) -> Decoder:
    """A decoder on the meta device, its parameters of the types that they are to have; without a precision, all float32."""
    with torch.device("meta"):
        model = Decoder(config, max_positions)
    if precision is not None and precision.quantized:
        quantize_linears(model, precision.format_of)
    elif precision is not None:
        model.to(precision.dtype)
        model.tie_weights()
    return model


def weight_bytes(config: ModelConfig, precision: Precision) -> int:
    """Bytes that the weights of a model take."""
    return sum(tensor.nbytes for tensor in wanted_tensors(blank_model(config, precision)).values())


def load_tokenizer(source: str) -> PreTrainedTokenizerBase | None:
    """The tokenizer alone; None where a model folder holds none. Raises ModelError when it cannot be built."""
    path = resolve_source(source, config_only=True)
    return _tokenizer(path, read_gguf(path) if path.is_file() else None)


def inspect_model(source: str) -> ModelConfig:
    """The config alone. Raises as `load_model` does."""
    return open_model(source).config


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


def _load_converted(model: Decoder, conversion: Conversion, device: torch.device, progress: Callable[[str], None]) -> None:
    """From the conversion cache, which is made again, once, when its file proves damaged; small models are converted every time."""
    if conversion.size_bytes < converted.LEAST_KEPT_BYTES:
        load_tensors(model, conversion.wanted, convert_in_memory(conversion, progress).__getitem__, device)
        return
    for attempt in (1, 2):
        try:
            cached = cached_path(conversion)
            if not cached.exists():
                progress(f"converting {conversion.title} ({conversion.size_bytes / 1e9:.1f} GB, once)")
                write_converted(conversion, cached, progress)
                conversion.checkpoint.release()  # before the converted weights take as much again
        except OSError as error:
            size = f"{conversion.size_bytes / 1e9:.1f} GB"
            progress(f"the converted weights cannot be kept ({error}); set SPECDEC_CACHE to a folder with {size} to start faster")
            load_tensors(model, conversion.wanted, convert_in_memory(conversion, progress).__getitem__, device)
            return
        try:
            load_tensors(model, conversion.wanted, _reader(cached, conversion), device)
            return
        except WeightError as error:
            if attempt == 2:
                raise
            progress(f"the converted weights at {cached} are damaged ({error}); making them again")
            cached.unlink(missing_ok=True)


def _reader(cached: Path, conversion: Conversion) -> Callable[[str], Tensor]:
    """Gives a converted tensor by name: blocks out of huge pages where there are some, all else mapped from the file."""
    kept = open_file(cached)
    if kept.files.keys() != conversion.wanted.keys():
        raise WeightError(f"{cached}: must hold {len(conversion.wanted)} tensors under the model's names, got {len(kept.files)}")
    blocks = [name for name, tensor in conversion.wanted.items() if tensor.dtype == torch.uint8]
    resident = read_into_huge_pages(cached, blocks) if blocks else {}
    return lambda name: resident[name] if name in resident else kept.tensor(name)


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
