"""Models: one decoder for the families that share its shape, and loading from safetensors folders, hub ids and GGUF files."""

from specdec.models.config import ModelConfig
from specdec.models.decoder import Decoder
from specdec.models.loading import LoadedModel, inspect_model, load_model, load_tokenizer, resolve_dtype
from specdec.models.sources import resolve_source

__all__ = ["Decoder", "LoadedModel", "ModelConfig", "inspect_model", "load_model", "load_tokenizer", "resolve_dtype", "resolve_source"]
