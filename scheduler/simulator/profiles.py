"""Which model profiles there are, and their arithmetic as text."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from pathlib import Path

from specdec.errors import ConfigError
from specdec.scheduler.simulator.measured import cpu_135m, cpu_500m, read_profile
from specdec.scheduler.simulator.profile import Profile
from specdec.scheduler.simulator.roofline import Load, Roofline
from specdec.scheduler.simulator.theoretical import h200_8b, h200_70b, h200_671b

_BUILT_IN: Mapping[str, Callable[[], Profile]] = {
    "h200-8b": h200_8b,
    "h200-70b-tp4": h200_70b,
    "h200-671b-tp8": h200_671b,
    "cpu-135m": cpu_135m,
    "cpu-0.5b": cpu_500m,
}


def load_profile(name: str) -> Profile:
    """A built-in profile, or that of a JSON file, see `read_profile`.

    Raises:
        ConfigError: no such profile, or the file holds none.
    """
    if name in _BUILT_IN:
        return _BUILT_IN[name]()
    if name.endswith(".json"):
        return read_profile(Path(name))
    near = difflib.get_close_matches(name, _BUILT_IN, 1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"unknown model profile {name!r}{hint} Known: {', '.join(_BUILT_IN)}, or a JSON file of `specdec bench --json`")


def profile_names() -> tuple[str, ...]:
    return tuple(_BUILT_IN)


def describe(profile: Profile) -> str:
    """The profile's arithmetic, as text."""
    lines = [f"{profile.name}: {profile.about}", f"KV pool: {profile.kv_tokens} tokens"]
    if isinstance(profile.forward, Roofline):
        lines += _describe_roofline("target", profile.forward)
    lines += ["", "step of n token rows behind 1024 tokens each, milliseconds:"]
    sizes = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
    lines.append("  rows    " + "".join(f"{n:>8}" for n in sizes))
    lines.append("  forward " + "".join(f"{1000 * profile.forward.seconds(Load(n, 1024 * n, 1024 * n, n)):8.2f}" for n in sizes))
    for name, draft in profile.drafters.items():
        text = "".join(f"{1000 * draft.seconds(n, 1, n, 1024 * n):8.2f}" for n in sizes)
        lines.append(f"  {name:<8}{text}   drafting one token for each, at most {draft.limit} deep")
    return "\n".join(lines)


def _describe_roofline(title: str, roofline: Roofline) -> list[str]:
    shape, device = roofline.shape, roofline.device
    routed = shape.experts
    lines = [
        f"{title}: {shape.params / 1e9:.2f}e9 weights of {shape.weight_bytes:g} bytes on {roofline.ranks} x {device.name}: "
        f"{roofline.weight_bytes / 1e9:.1f} GB each, KV {roofline.kv_token_bytes:.0f} bytes per token and device",
        "  seconds(tokens, kv) = max(bytes / bandwidth, operations / rate) + all-reduces + launch",
        f"  bandwidth = {device.bandwidth / 1e12:g} TB/s x {device.bandwidth_share:g}, "
        f"rate = {device.flops * (2 if shape.weight_bytes == 1 else 1) / 1e12:g} T/s x {device.flops_share:g}, "
        f"launch = {1e6 * device.launch_s:.0f} us, all-reduces of one row = {1e6 * roofline.reduce_s(1):.0f} us",
        f"  operations = 2 x {shape.active_params / 1e9:.2f}e9 per token + 2 x {shape.head_params / 1e9:.2f}e9 per row with logits "
        f"+ 2 x {shape.layers} x {shape.attention_width} per attended pair, over {roofline.ranks} devices",
    ]
    if routed:
        counts = ", ".join(f"{n}: {routed.read(n):.0f}" for n in (1, 4, 16, 64, 256))
        lines.append(f"  experts read per layer = {routed.total} (1 - (1 - {routed.active}/{routed.total})^tokens): {counts}")
    return lines
