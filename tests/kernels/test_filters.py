"""top_k, top_p, min_p and typical_p: what they keep, and the compiled kernel against its reference."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.kernels import cpu_ops, filters
from specdec.kernels.filters import filter_logits


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([1, 5, 64, 300, 5000]),
    st.sampled_from(["normal", "ties", "masked", "flat", "equal"]),
)
@settings(max_examples=80, deadline=None)
def test_the_compiled_filter_keeps_the_same_tokens(seed: int, vocabulary: int, kind: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = 6
    logits = torch.randn(rows, vocabulary, generator=generator) * (0.05 if kind == "flat" else 3)
    if kind == "ties":
        logits = logits.round()
    elif kind == "masked":
        logits[torch.rand(rows, vocabulary, generator=generator) < 0.8] = -torch.inf
    elif kind == "equal":
        logits[:] = 1.5

    def pick(*values: float) -> torch.Tensor:
        return torch.tensor(values)[torch.randint(0, len(values), (rows,), generator=generator)]

    columns = {
        "temperature": pick(0.0, 0.1, 0.7, 1.0, 5.0),
        "top_k": pick(0, 0, 1, 2, 17, 1000, 10**6),
        "top_p": pick(1.0, 1.0, 0.999, 0.9, 0.5, 1e-6),
        "min_p": pick(0.0, 0.0, 1e-6, 0.05, 1.0),
        "typical_p": pick(1.0, 1.0, 0.9, 0.2),
    }
    assert torch.equal(cpu_ops.filter_logits(logits, **columns), filters.filter_logits(logits, **columns))


def filtered(logits: list[float], **filters: float) -> list[int]:
    defaults = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | filters
    row = torch.tensor([logits])
    columns = {name: torch.tensor([value], dtype=torch.int64 if name == "top_k" else torch.float32) for name, value in defaults.items()}
    return filter_logits(row, **columns)[0].isfinite().nonzero().squeeze(1).tolist()


def test_filters_keep_what_they_should() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().tolist()
    assert filtered(logits, top_k=2) == [0, 1]
    assert filtered(logits, top_p=0.69) == [0, 1]
    assert filtered(logits, top_p=0.71) == [0, 1, 2]
    assert filtered(logits, top_p=0.01) == [0]
    assert filtered(logits, min_p=0.51) == [0, 1]
    assert filtered(logits, min_p=0.49) == [0, 1, 2]
    assert filtered(logits, top_k=3, top_p=0.7) == [0, 1]  # top_p counts what top_k left: 4/9 + 3/9 > 0.7
    assert filtered([1.0, 1.0, 1.0, 0.0], top_k=2) == [0, 1]  # ties by the lowest id
    assert filtered(logits, temperature=0.0, top_k=1) == [0, 1, 2, 3]  # greedy rows are not touched


def test_rows_without_filters_are_not_copied() -> None:
    logits = torch.randn(2, 9)
    off = (torch.ones(2), torch.zeros(2, dtype=torch.int64), torch.ones(2), torch.zeros(2))
    assert filter_logits(logits, *off) is logits
