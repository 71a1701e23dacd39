"""A draft model on scratch KV: what it proposes, what it keeps, where it stops."""

import numpy as np
import pytest
import torch

from specdec.backend.cpu import CPUBackend
from specdec.config import EngineConfig
from specdec.drafters.base import DraftOutcome
from specdec.drafters.draft_model import DraftModelDrafter, load_draft_model
from specdec.errors import ConfigError, DrafterError
from specdec.models import load_model
from specdec.pack import PackRow
from specdec.request import SamplingParams
from specdec.runner import ForwardOutput, ModelRunner
from specdec.testing import ScratchKV, make_context, make_row, tiny_prompt, write_const_checkpoint, write_tiny_checkpoint
from specdec.tree import DraftTree

SAMPLED = SamplingParams(temperature=0.8)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))
    return load_model(str(folder), dtype="float32", device=torch.device("cpu"))


@pytest.fixture(scope="module")
def reference(tiny):
    """The ids that plain decoding with the context's own sampling gives: (row, count) -> ids."""

    def generate(row, count):
        context = make_context()
        kv = ScratchKV(2, 2, 16, torch.float32, 16, 256)
        runner = ModelRunner(tiny.model, CPUBackend(), kv)
        tokens, ids = list(row.tokens), []
        for _ in range(count):
            logits = runner.forward([PackRow(tokens, 0, kv.pages("x"), 1)]).logits
            ids += context.sample(logits, [row], [len(tokens)])
            tokens.append(ids[-1])
        return ids

    return generate


class Counting:
    """Wraps a runner and records how many tokens each forward of each row had."""

    def __init__(self, runner):
        self._runner = runner
        self.forwards = []

    def forward(self, rows):
        self.forwards.append([len(row.tokens) for row in rows])
        return self._runner.forward(rows)


class FirstRowIsNaN:
    """Wraps a runner whose first logit row is broken."""

    def __init__(self, runner):
        self._runner = runner

    def forward(self, rows):
        output = self._runner.forward(rows)
        logits = output.logits.clone()
        logits[0] = torch.nan
        return ForwardOutput(logits, output.hidden)


def drafter_of(tiny, depth=4, counting=False, **context):
    drafter = DraftModelDrafter(make_context(**context), tiny, depth)
    if counting:
        drafter._runner = Counting(drafter._runner)
    return drafter


def outcome(row, tree, accepted, correction):
    """The first `accepted` draft tokens came, then `correction`."""
    emitted = (*tree.tokens[:accepted].tolist(), correction)
    return DraftOutcome(row.request_id, tree, tuple(range(accepted)), emitted, {})


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 64])
@pytest.mark.parametrize("params", [SamplingParams(temperature=0), SAMPLED])
def test_it_proposes_what_the_target_would_choose(tiny, reference, length, params):
    row = make_row(tiny_prompt(length), limit=4, params=params, seed=7)
    (tree,) = drafter_of(tiny).propose([row])
    assert tree.is_chain() and tree.tokens.tolist() == reference(row, 4)
    assert tree.confidence is not None and ((tree.confidence > 0) & (tree.confidence <= 1)).all()


def test_rows_do_not_mix_and_each_has_its_own_limits(tiny, reference):
    rows = [
        make_row(tiny_prompt(5), request_id="a", limit=1),
        make_row(tiny_prompt(33), request_id="b", limit=8, depth=3),
        make_row(tiny_prompt(17), request_id="c", limit=8, params=SAMPLED, seed=3),
    ]
    trees = drafter_of(tiny, depth=5).propose(rows)
    assert [len(tree) for tree in trees] == [1, 3, 5]
    for row, tree in zip(rows, trees, strict=True):
        assert tree.tokens.tolist() == reference(row, len(tree))


@pytest.mark.parametrize("accepted", [0, 1, 2, 3, 4])
def test_accepted_tokens_are_not_forwarded_again_and_rejected_ones_leave_nothing(tiny, reference, accepted):
    drafter = drafter_of(tiny, counting=True)
    first = make_row(tiny_prompt(20), limit=4)
    (tree,) = drafter.propose([first])
    assert drafter._runner.forwards == [[20], [1], [1], [1]]
    correction = 5 if accepted < 4 else 6
    drafter.observe([outcome(first, tree, accepted, correction)])
    drafter._runner.forwards.clear()
    second = make_row([*first.tokens, *tree.tokens[:accepted].tolist(), correction], num_prompt=20, limit=4)
    (again,) = drafter.propose([second])
    # of 4 drafted tokens 3 were forwarded; the fourth, where accepted, is pending beside the correction
    assert drafter._runner.forwards[0] == [2 if accepted == 4 else 1]
    assert again.tokens.tolist() == reference(second, 4)


def test_a_step_that_nobody_reported_is_forwarded_again(tiny, reference):
    drafter = drafter_of(tiny, counting=True)
    first = make_row(tiny_prompt(20), limit=4)
    (tree,) = drafter.propose([first])
    drafter._runner.forwards.clear()
    second = make_row([*first.tokens, int(tree.tokens[0]), 9], num_prompt=20, limit=4)
    assert drafter.propose([second])[0].tokens.tolist() == reference(second, 4)
    assert drafter._runner.forwards[0] == [2]


def test_forgotten_requests_start_anew(tiny, reference):
    drafter = drafter_of(tiny)
    row = make_row(tiny_prompt(20), limit=4)
    (tree,) = drafter.propose([row])
    drafter.forget("request")
    drafter.forget("request")
    drafter._kv.set_cached("request", 0)
    drafter.observe([outcome(row, tree, 4, 6)])
    assert drafter._kv.cached("request") == 0
    other = make_row(tiny_prompt(9, seed=4), limit=4)
    assert drafter.propose([other])[0].tokens.tolist() == reference(other, 4)


def test_a_long_prompt_is_caught_up_in_chunks(tiny, reference):
    config = EngineConfig(max_batch_tokens=24, max_num_seqs=8)
    drafter = drafter_of(tiny, counting=True, config=config)
    rows = [make_row(tiny_prompt(50), request_id="a", limit=2), make_row(tiny_prompt(7), request_id="b", limit=2)]
    trees = drafter.propose(rows)
    assert drafter._runner.forwards == [[24], [24], [2, 7], [1, 1]]
    for row, tree in zip(rows, trees, strict=True):
        assert tree.tokens.tolist() == reference(row, 2)


def test_rows_that_catch_up_in_different_forwards_keep_their_logits(tmp_path):
    """A compiled forward reuses its logits: those of the row that is done first must outlast the other's chunks."""
    loaded = load_model(str(write_tiny_checkpoint(tmp_path)), dtype="int8", device=torch.device("cpu"))
    config = EngineConfig(max_batch_tokens=24, max_num_seqs=8)
    rows = [make_row(tiny_prompt(length), request_id=str(length), limit=4) for length in (7, 64)]
    alone = [drafter_of(loaded, config=config).propose([row])[0].tokens.tolist() for row in rows]
    together = drafter_of(loaded, config=config).propose(rows)
    assert [tree.tokens.tolist() for tree in together] == alone


def test_at_its_own_length_limit_a_row_gets_nothing_and_its_neighbour_goes_on(tmp_path):
    short = load_model(str(write_tiny_checkpoint(tmp_path, max_length=32)), dtype="float32", device=torch.device("cpu"))
    drafter = drafter_of(short, depth=8)
    rows = [make_row(tiny_prompt(length), request_id=str(length), limit=8) for length in (20, 26, 31, 32, 33, 60)]
    assert [len(tree) for tree in drafter.propose(rows)] == [8, 6, 1, 0, 0, 0]


@pytest.mark.parametrize(("draft_size", "target_size"), [(32, 16), (16, 32)])
def test_padded_vocabularies_work_on_either_side(tmp_path, draft_size, target_size):
    logits = [0.0] * draft_size
    logits[draft_size - 1] = 9.0  # the best id, which a smaller target does not have
    logits[3] = 5.0
    loaded = load_model(str(write_const_checkpoint(tmp_path, logits)), dtype="float32", device=torch.device("cpu"))
    drafter = DraftModelDrafter(make_context(target_size), loaded, depth=2)
    (tree,) = drafter.propose([make_row([1, 2], limit=2)])
    expected = 3 if draft_size > target_size else draft_size - 1
    assert tree.tokens.tolist() == [expected] * 2
    tree.validate(target_size)


def test_logits_that_allow_no_token_end_that_draft_only(tiny):
    drafter = drafter_of(tiny)
    drafter._runner = FirstRowIsNaN(drafter._runner)
    for params in (SamplingParams(temperature=0), SAMPLED):
        rows = [make_row(tiny_prompt(4), request_id=a, limit=1, params=params) for a in "ab"]
        assert [len(tree) for tree in drafter.propose(rows)] == [0, 1]


def test_a_temperature_that_is_a_whole_number_is_a_temperature(tiny):
    whole, real = (
        drafter_of(tiny).propose([make_row(tiny_prompt(9), limit=4, params=SamplingParams(temperature=t), seed=3)])[0] for t in (2, 2.0)
    )
    assert len(whole) == 4 and whole.tokens.tolist() == real.tokens.tolist()
    assert whole.confidence.tolist() == real.confidence.tolist()


def test_another_tokenizer_is_refused(tiny):
    class Tokenizer:
        def get_vocab(self):
            return {"a": 0, "b": 1}

    from dataclasses import replace

    other = replace(tiny, tokenizer=Tokenizer())
    with pytest.raises(DrafterError, match="tokenizer is not the target's"):
        DraftModelDrafter(make_context(tokenizer_fingerprint="something else"), other)
    DraftModelDrafter(make_context(), other)
    DraftModelDrafter(make_context(tokenizer_fingerprint="something else"), tiny)


@pytest.mark.parametrize("params", [SamplingParams(temperature=0), SAMPLED, SamplingParams(temperature=0.8, top_k=3)])
@pytest.mark.parametrize("wants_q", [False, True])
def test_a_short_vocabulary_drafts_its_own_ids_only(tmp_path, params, wants_q):
    logits = [0.0] * 16
    logits[5], logits[12] = 8.0, 30.0
    folder = write_const_checkpoint(tmp_path, logits)
    drafter = load_draft_model(make_context(16), str(folder), tree="2-1", vocab=8)
    (tree,) = drafter.propose([make_row([1, 13], limit=4, params=params, wants_q=wants_q)])
    assert len(tree) and tree.tokens.max() < 8 and 5 in tree.tokens
    tree.validate(16)
    with pytest.raises(ConfigError, match="vocab must be at least 1"):
        load_draft_model(make_context(16), str(folder), vocab=0)


def test_loading_by_spec(tmp_path):
    folder = write_tiny_checkpoint(tmp_path / "model")
    drafter = load_draft_model(make_context(), str(folder), depth=3)
    assert drafter.default_limit == 3 and drafter.needs.kv
    assert len(drafter.propose([make_row(tiny_prompt(3), limit=9)])[0]) == 3
    with pytest.raises(ConfigError, match="no such model"):
        load_draft_model(make_context(), str(tmp_path / "none"))
    (folder / "model.safetensors").write_bytes(b"cut short")
    with pytest.raises(DrafterError, match="model:"):
        load_draft_model(make_context(), str(folder))


def test_an_empty_step_and_an_unknown_outcome_are_nothing(tiny):
    drafter = drafter_of(tiny)
    assert drafter.propose([]) == []
    drafter.observe([DraftOutcome("nobody", DraftTree.chain([1]), (), (2,), {})])
    assert np.all(drafter._kv.cached("nobody") == 0)
