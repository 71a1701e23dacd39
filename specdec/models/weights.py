"""Safetensors checkpoints, and the loading of their tensors into a decoder that was built on the meta device.

Tensors are mapped, not read: one that already has the target dtype and device costs no memory of its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from specdec.errors import ModelError, WeightError
from specdec.models.decoder import Decoder

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_HARMLESS = ("rotary_emb.inv_freq", "self_attn.masked_bias", "self_attn.bias")  # constants that old checkpoints hold


class SafetensorsFiles:
    """Named tensors in one or more safetensors files.

    Args:
        files: parameter name -> file.
    """

    def __init__(self, files: Mapping[str, Path]) -> None:
        self.files = files
        self._open: dict[Path, Any] = {}  # safetensors' file handles are untyped

    def read(self, name: str) -> Tensor:
        """The tensor, mapped from its file. Raises WeightError naming both when it cannot be had."""
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


def load_weights(
    model: Decoder,
    names: Mapping[str, Path],
    read: Callable[[str], Tensor],
    *,
    dtype: torch.dtype,
    device: torch.device,
    check_finite: bool = True,
) -> None:
    """Fills a decoder, tensor by tensor.

    Args:
        names: every name the checkpoint holds, with the file it is in, for errors.
        read: gives a tensor by name.
        check_finite: look for NaN and infinite numbers; costs a pass over the weights.

    Raises:
        WeightError: a tensor is missing, extra, misshapen, not a float or not finite; the message names tensor and file.
    """
    tied = model.config.tie_word_embeddings
    wanted = {name: parameter.shape for name, parameter in model.named_parameters() if not (tied and name == "lm_head.weight")}
    _check_names(wanted, names, tied)
    for name, shape in wanted.items():
        tensor = read(name)
        if tensor.shape != shape:
            raise WeightError(f"{names[name]}: tensor {name} must have shape {list(shape)}, got {list(tensor.shape)}")
        if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
            raise WeightError(f"{names[name]}: tensor {name} must be float32, float16 or bfloat16, got {tensor.dtype}")
        if check_finite and not _is_finite(tensor):
            raise WeightError(f"{names[name]}: tensor {name} holds NaN or infinite numbers")
        module, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(module), leaf, nn.Parameter(tensor.to(device=device, dtype=dtype), requires_grad=False))
    model.tie_weights()


def _check_names(wanted: Mapping[str, torch.Size], names: Mapping[str, Path], tied: bool) -> None:
    missing = [name for name in wanted if name not in names]
    if missing:
        where = ", ".join(sorted({path.name for path in names.values()})) or "the checkpoint"
        folder = next(iter(names.values())).parent if names else ""
        raise WeightError(f"{folder}: {len(missing)} tensors are missing from {where}: {_some(missing)}")
    extra = [name for name in names if name not in wanted and not name.endswith(_HARMLESS) and not (tied and name == "lm_head.weight")]
    if extra:
        raise WeightError(f"{names[extra[0]]}: {len(extra)} tensors are not part of this architecture: {_some(extra)}")


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _is_finite(tensor: Tensor) -> bool:
    """A sum is one quick pass and not finite if any number is not; it may also overflow, so that is looked into."""
    return bool(torch.isfinite(tensor.sum(dtype=torch.float32))) or bool(torch.isfinite(tensor).all())


def _open(path: Path) -> Any:  # a safetensors file handle
    from safetensors import safe_open

    try:
        return safe_open(path, framework="pt")
    except Exception as error:  # SafetensorError derives from Exception
        raise WeightError(f"{path}: damaged or cut short: {error}; fetch it again") from error
