"""Profiles from rooflines: models on devices that are not there."""

from __future__ import annotations

from specdec.scheduler.simulator import shapes
from specdec.scheduler.simulator.costs import DraftCost, HostCost
from specdec.scheduler.simulator.profile import NGRAM, Profile
from specdec.scheduler.simulator.roofline import Device, ModelShape, Roofline

_KV_SHARE = 0.9  # of a device's memory, for weights and KV together; the rest is activations and graphs
_LIMIT = 8  # nodes that a head or a small model drafts
# Host work of a GPU server's step, the sampling kernels and the walk: assumed, in the range of today's engines.
_HOST = HostCost(step_s=150e-6, row_s=1e-6, sample_s=60e-6, sample_row_s=0.4e-6, commit_row_s=1e-6)


def h200_8b() -> Profile:
    about = "theoretical: Llama 3.1 8B in bf16 on one H200; drafters: ngram, a 1-layer head, Llama 3.2 1B"
    return _theoretical("h200-8b", about, shapes.LLAMA_8B, shapes.LLAMA_8B_HEAD, shapes.H200, 1, shapes.LLAMA_1B)


def h200_70b() -> Profile:
    about = "theoretical: Llama 3.1 70B in bf16 on four H200 (TP 4); drafters: ngram, a 1-layer head, Llama 3.2 1B"
    return _theoretical("h200-70b-tp4", about, shapes.LLAMA_70B, shapes.LLAMA_70B_HEAD, shapes.H200, 4, shapes.LLAMA_1B)


def h200_671b() -> Profile:
    about = "theoretical: DeepSeek-V3 671B in fp8 on eight H200 (TP 8); drafters: ngram, its own prediction module"
    return _theoretical("h200-671b-tp8", about, shapes.DEEPSEEK_V3, shapes.DEEPSEEK_V3_HEAD, shapes.H200, 8)


def _theoretical(
    name: str, about: str, shape: ModelShape, head: ModelShape, device: Device, ranks: int, model: ModelShape | None = None
) -> Profile:
    """Drafters run on the target's devices: the head split as the target is, a small model on one. KV takes the memory left."""
    target, head_costs = Roofline(shape, device, ranks), Roofline(head, device, ranks)
    drafters = {"ngram": NGRAM, "head": DraftCost(_LIMIT, head_costs)}
    rooflines = [target, head_costs]
    if model is not None:
        rooflines.append(Roofline(model, device))
        drafters["model"] = DraftCost(_LIMIT, rooflines[-1])
    left = device.memory * _KV_SHARE - sum(roofline.weight_bytes for roofline in rooflines)
    kv_tokens = int(left / sum(roofline.kv_token_bytes for roofline in rooflines))
    return Profile(name, about, "theoretical", target, drafters, _HOST, kv_tokens)
