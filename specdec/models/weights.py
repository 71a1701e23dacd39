"""Checkpoints as named tensors, safetensors ones among them, and the loading of tensors into a decoder built on the meta device.

Tensors are mapped, not read: one that already has the target dtype and device costs no memory of its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from specdec.errors import ModelError, WeightError
from specdec.models.decoder import Decoder
from specdec.quantization.int4 import Parts

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_HARMLESS = ("rotary_emb.inv_freq", "self_attn.masked_bias", "self_attn.bias")  # constants that old checkpoints hold


class Checkpoint(Protocol):
    """Named float tensors, under the names of the decoder's parameters.

    Attributes:
        files: every name the checkpoint holds, with the file it is in, for errors.
    """

    @property
    def files(self) -> Mapping[str, Path]: ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Raises WeightError unless the tensor is there and of a float type."""
        ...

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows [start, stop) of the first dimension. Raises WeightError where one holds NaN or infinite numbers."""
        ...

    def read_four_bit(self, name: str, start: int, stop: int) -> Parts:
        """Rows [start, stop) of a weight that is kept in 4-bit blocks, taken apart."""
        ...

    def release(self) -> None:
        """Gives back the memory of what was read and is not in use; reading on is allowed."""
        ...


class SafetensorsFiles:
    """Named tensors in one or more safetensors files; a `Checkpoint`.

    Args:
        files: parameter name -> file.
    """

    def __init__(self, files: Mapping[str, Path]) -> None:
        self.files = files
        self._open: dict[Path, Any] = {}  # safetensors' file handles are untyped

    def shape(self, name: str) -> tuple[int, ...]:
        tensor = self.tensor(name)
        if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
            raise WeightError(f"{self.files[name]}: tensor {name} must be float32, float16 or bfloat16, got {tensor.dtype}")
        return tuple(tensor.shape)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        rows = self.tensor(name)[start:stop]
        if not is_finite(rows):
            raise WeightError(f"{self.files[name]}: tensor {name} holds NaN or infinite numbers")
        return rows

    def read_four_bit(self, name: str, start: int, stop: int) -> Parts:
        raise WeightError(f"{self.files[name]}: tensor {name} is not kept in 4-bit blocks")

    def release(self) -> None:
        self._open.clear()  # a file stays mapped as long as one of its tensors is in use

    def tensor(self, name: str) -> Tensor:
        """The tensor, mapped from its file and not looked at. Raises WeightError naming both when it cannot be had."""
        path = self.files[name]
        try:
            if path not in self._open:
                self._open[path] = _open(path)
            tensor: Tensor = self._open[path].get_tensor(name)
        except WeightError:
            raise
        except Exception as error:  # SafetensorError derives from Exception
            raise WeightError(f"{path}: tensor {name} cannot be read: {error}") from error
        return tensor


def open_folder(folder: Path) -> SafetensorsFiles:
    """The checkpoint of a model folder, single or sharded. Raises WeightError where a file is missing or damaged."""
    index, single = folder / _INDEX, folder / _SINGLE
    if index.is_file():
        try:
            names = json.loads(index.read_text())["weight_map"]
        except (ValueError, KeyError) as error:
            raise WeightError(f"{index}: not a weight index: {error!r}") from error
        files = {name: folder / shard for name, shard in names.items()}
        for path in sorted(set(files.values())):
            if not path.is_file():
                raise WeightError(f"{path}: missing, though {_INDEX} names it")
        return SafetensorsFiles(files)
    if single.is_file():
        return open_file(single)
    raise ModelError(f"{folder}: holds neither {_SINGLE} nor {_INDEX}; other weight formats cannot be read")


def open_file(path: Path) -> SafetensorsFiles:
    """All tensors of one safetensors file. Raises WeightError when it is damaged."""
    return SafetensorsFiles(dict.fromkeys(_open(path).keys(), path))


def wanted_tensors(model: Decoder) -> dict[str, Tensor]:
    """Names, shapes and dtypes of the tensors that fill a decoder; a tied output projection has none of its own."""
    tied = model.config.tie_word_embeddings
    return {name: tensor for name, tensor in model.state_dict().items() if not (tied and name == "lm_head.weight")}


def check_names(wanted: Mapping[str, Tensor], checkpoint: Checkpoint) -> None:
    """Raises WeightError, naming tensor and file, where one is missing, extra, misshapen or not of a float type."""
    names = checkpoint.files
    missing = [name for name in wanted if name not in names]
    if missing:
        where = ", ".join(sorted({path.name for path in names.values()})) or "the checkpoint"
        folder = next(iter(names.values())).parent if names else ""
        raise WeightError(f"{folder}: {len(missing)} tensors are missing from {where}: {_some(missing)}")
    # a head beside tied embeddings says the same once more
    extra = [name for name in names if name not in wanted and not name.endswith(_HARMLESS) and name != "lm_head.weight"]
    if extra:
        raise WeightError(f"{names[extra[0]]}: {len(extra)} tensors are not part of this architecture: {_some(extra)}")
    for name, tensor in wanted.items():
        if (shape := checkpoint.shape(name)) != tuple(tensor.shape):
            raise WeightError(f"{names[name]}: tensor {name} must have shape {list(tensor.shape)}, got {list(shape)}")


def load_tensors(model: Decoder, wanted: Mapping[str, Tensor], read: Callable[[str], Tensor], device: torch.device) -> None:
    """Puts tensors into a decoder, converted to the dtypes wanted.

    Raises:
        WeightError: one is not of the shape wanted, or of a wrong kind.
    """
    for name, meta in wanted.items():
        tensor = read(name)
        if tensor.shape != meta.shape or tensor.is_floating_point() != meta.is_floating_point():
            raise WeightError(f"tensor {name} must be {meta.dtype} {list(meta.shape)}, got {tensor.dtype} {list(tensor.shape)}")
        module, _, leaf = name.rpartition(".")
        owner, placed = model.get_submodule(module), tensor.to(device=device, dtype=meta.dtype)
        setattr(owner, leaf, nn.Parameter(placed, requires_grad=False) if leaf in owner._parameters else placed)
    model.tie_weights()


def is_finite(tensor: Tensor) -> bool:
    """A sum is one quick pass and not finite if any number is not; it may also overflow, so that is looked into."""
    return bool(torch.isfinite(tensor.sum(dtype=torch.float32))) or bool(torch.isfinite(tensor).all())


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _open(path: Path) -> Any:  # a safetensors file handle
    from safetensors import safe_open

    try:
        return safe_open(path, framework="pt")
    except Exception as error:  # SafetensorError derives from Exception
        raise WeightError(f"{path}: damaged or cut short: {error}; fetch it again") from error
