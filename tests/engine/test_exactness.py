"""On real weights: the bits of a row's logits do not depend on what else is in the forward, in float32 and bfloat16."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from specdec.llm import LLM
from specdec.pack import PackRow
from specdec.request import SamplingParams
from specdec.testing import RandomTree

TEXT = "List: apple, banana, apple, banana, apple, pear. Sort the list, then print it:\n1. apple\n2."
PARAMS = SamplingParams(max_tokens=24, temperature=1.3, top_k=1000, seed=4, ignore_eos=True)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def demo(request: pytest.FixtureRequest, demo_model: Path) -> LLM:
    return LLM(str(demo_model), dtype=request.param, num_pages=256, max_num_seqs=8, drafter=RandomTree(1000), draft_budget="all")


def logits_by(llm: LLM, ids: list[int], sizes: list[int]) -> torch.Tensor:
    """float32 [len(ids), vocabulary] of one text, forwarded in chunks of the given sizes, over and over."""
    pages = np.arange(64, dtype=np.int32)
    parts, start = [], 0
    while start < len(ids):
        chunk = ids[start : start + sizes[len(parts) % len(sizes)]]
        parts.append(llm.engine.target.forward([PackRow(chunk, start, pages, len(chunk))]).logits.clone())
        start += len(chunk)
    return torch.cat(parts)


def test_logits_are_the_same_bits_whatever_the_chunks(demo: LLM) -> None:
    assert demo.engine.tokenizer is not None
    ids = demo.engine.tokenizer.encode(TEXT)
    alone = logits_by(demo, ids, [1])
    for sizes in ([2], [3, 1, 7], [16], [len(ids)]):
        assert torch.equal(logits_by(demo, ids, sizes), alone)
    demo.engine.reset_prefix_cache()


def test_sampled_ids_do_not_depend_on_batch_or_drafter(demo: LLM) -> None:
    prompts = [TEXT[:size] for size in (20, 43, 60, len(TEXT))]
    params = [replace(PARAMS, seed=seed) for seed in range(4)]
    alone = [demo.generate([prompt], one, drafter="off")[0].token_ids for prompt, one in zip(prompts, params, strict=True)]
    for drafter in ("off", "ngram", None):
        outputs = demo.generate(prompts, params, drafter=drafter)
        assert [output.token_ids for output in outputs] == alone
    guessed = demo.generate(prompts, params, drafter="prediction", predictions=alone)
    assert [output.token_ids for output in guessed] == alone
    assert all(output.stats.accepted == output.stats.drafted > 0 for output in guessed)
