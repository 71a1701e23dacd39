"""A model profile: what a step costs on some device, and where that is known from. Values only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from specdec.errors import ConfigError
from specdec.scheduler.simulator.costs import DraftCost, ForwardCost, HostCost

# Host time of the n-gram drafter, in the range of what `benchmarks/host_step.py` measures on a CPU core.
NGRAM = DraftCost(limit=8, call_s=20e-6, row_s=4e-6)


@dataclass(frozen=True)
class Profile:
    """A model on a device, for the simulator.

    Attributes:
        name, about: what it is, and where its figures come from.
        kind: `theoretical` or `measured`.
        forward: of the target.
        drafters: by name.
        host: everything beside.
        kv_tokens: tokens that the KV pool holds.
        max_num_seqs, max_batch_tokens: defaults of the engine's limits.
    """

    name: str
    about: str
    kind: str
    forward: ForwardCost
    drafters: Mapping[str, DraftCost]
    host: HostCost
    kv_tokens: int
    max_num_seqs: int = 256
    max_batch_tokens: int = 2048

    def drafter(self, name: str) -> DraftCost:
        """Raises ConfigError for a drafter that the profile does not have."""
        if name not in self.drafters:
            raise ConfigError(f"profile {self.name} has no drafter {name!r}; it has {', '.join(self.drafters)}")
        return self.drafters[name]
