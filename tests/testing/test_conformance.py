"""The conformance kit passes good drafters and finds what is wrong with others."""

import pytest

from specdec.drafters import registry
from specdec.errors import ConfigError, DrafterError
from specdec.testing import OneHot, check_drafter, tiny_prompt, write_const_checkpoint
from specdec.testing.drafters import self_drafter
from specdec.tree import DraftTree

PROMPTS = [tiny_prompt(3), tiny_prompt(5) * 3, tiny_prompt(253)]


@pytest.mark.parametrize("drafter", ["ngram", "ngram+prediction", OneHot(3, limit=3), lambda tokens, limit: tokens[:limit]])
def test_good_drafters_conform(drafter):
    before = dict(registry._registered)
    report = check_drafter(drafter, prompts=PROMPTS, max_tokens=8)
    assert report.drafted > 0 and 0 <= report.accepted <= report.drafted and report.acceptance_length >= 1
    assert registry._registered == before


def test_the_target_as_its_own_drafter_is_always_right():
    report = check_drafter(self_drafter(3), prompts=PROMPTS, max_tokens=9, must_accept=True)
    assert report.accepted == report.drafted > 0 and report.acceptance_length > 2.5


def test_a_right_prediction_is_accepted():
    output = check_prediction_output()
    report = check_drafter("prediction", prompts=[tiny_prompt(3)], predictions=[output], max_tokens=8, must_accept=True)
    assert report.accepted > 0


def check_prediction_output():
    """The tiny model's greedy output, by way of a drafter that sees it come."""
    seen = []

    def watch(tokens, limit):
        seen.append(tokens[3:])
        return []

    check_drafter(watch, prompts=[tiny_prompt(3)], max_tokens=8)
    return max(seen, key=len)


def test_a_model_may_be_given(tmp_path):
    folder = write_const_checkpoint(tmp_path, [0, 9, 0, 0], max_length=64)
    report = check_drafter(OneHot(1, limit=4), model=str(folder), prompts=[[2]], max_tokens=12, must_accept=True)
    assert report.accepted > 0


def test_what_is_wrong_is_told():
    class Bad(OneHot):
        def propose(self, rows):
            return [DraftTree.chain([512]) for _ in rows]

    with pytest.raises(DrafterError, match=r"does not conform:\n.*broke its contract \{'tree': .*\[0, 512\), got 512"):
        check_drafter(Bad(1), prompts=PROMPTS[:1], max_tokens=4)
    with pytest.raises(DrafterError, match="none of 0 drafted tokens was accepted"):
        check_drafter(lambda tokens, limit: [], prompts=PROMPTS[:1], max_tokens=4, must_accept=True)
    with pytest.raises(ConfigError, match="unknown drafter"):
        check_drafter("nothing", prompts=PROMPTS[:1])
    with pytest.raises(ValueError, match="belong to prompts"):
        check_drafter("prediction", predictions=[[1]])
