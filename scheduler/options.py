"""What a drafter spec allows: its parts, and the ways to use them. Specs are parsed once."""

from __future__ import annotations

from functools import lru_cache

from specdec.drafter_spec import parse_drafter_spec


@lru_cache(maxsize=1024)
def parts_of(spec: str) -> tuple[str, ...]:
    """Names of a spec's drafters: `a+b` has two, `off` none."""
    return tuple(str(part) for part in parse_drafter_spec(spec))


@lru_cache(maxsize=1024)
def options_of(spec: str) -> tuple[str, ...]:
    """Specs that a step may draft with under a spec, beside drafting nothing: the whole sum, or one of its parts."""
    parts = parts_of(spec)
    return (spec, *parts) if len(parts) > 1 else (spec,) if parts else ()
