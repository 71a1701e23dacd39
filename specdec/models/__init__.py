"""Models: one decoder for the families that share its shape, and loading from safetensors folders, hub ids and GGUF files."""

from specdec.models.config import ModelConfig
from specdec.models.decoder import Decoder
from specdec.models.loading import LoadedModel, ModelSource, inspect_model, load_model, load_tokenizer, open_model, weight_bytes
from specdec.models.precision import Precision, resolve_precision
from specdec.models.sources import resolve_source

__all__ = [
    "Decoder",
    "LoadedModel",
    "ModelConfig",
    "ModelSource",
    "Precision",
    "inspect_model",
    "load_model",
    "load_tokenizer",
    "open_model",
    "resolve_precision",
    "resolve_source",
    "weight_bytes",
]
