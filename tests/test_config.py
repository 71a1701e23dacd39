from typing import Any

import pytest

from specdec.config import EngineConfig
from specdec.errors import ConfigError, RequestError
from specdec.request import SamplingParams


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"dtype": "float16"}, "dtype"),
        ({"verify_rule": "typical"}, "verify_rule"),
        ({"page_size": 0}, "page_size"),
        ({"page_size": 1.5}, "page_size"),
        ({"max_num_seqs": True}, "max_num_seqs"),
        ({"seed": -1}, "seed"),
        ({"kv_memory_gb": 0}, "kv_memory_gb"),
        ({"kv_memory_gb": 1.0, "num_pages": 4}, "num_pages"),
        ({"max_batch_tokens": 4}, "max_batch_tokens"),
        ({"drafter": "ngram("}, "drafter"),
        ({"draft_timeout_s": 0}, "draft_timeout_s"),
        ({"draft_timeout_s": 1e12}, "draft_timeout_s"),
        ({"draft_timeout_s": True}, "draft_timeout_s"),
        ({"kv_memory_gb": float("inf")}, "kv_memory_gb"),
        ({"kv_memory_gb": "1"}, "kv_memory_gb"),
        ({"swap_gb": -0.1}, "swap_gb"),
        ({"threads": 0}, "threads"),
        ({"seed": 1.5}, "seed"),
        ({"seed": True}, "seed"),
        ({"seed": "x"}, "seed"),
        ({"model": None}, "model"),
        ({"model": 5}, "model"),
        ({"drafter": 5}, "drafter"),
        ({"prefix_cache": "no"}, "prefix_cache"),
        ({"num_pages": 0}, "num_pages"),
        ({"draft_budget": "some"}, "draft_budget"),
        ({"draft_budget": 0}, "draft_budget"),
        ({"draft_budget": "-1"}, "draft_budget"),
        ({"draft_budget": True}, "draft_budget"),
        ({"warm_up_s": -1.0}, "warm_up_s"),
        ({"target_itl_ms": 0.0}, "target_itl_ms"),
        ({"target_ttft_ms": float("nan")}, "target_ttft_ms"),
    ],
)
def test_an_impossible_option_is_refused_by_name(options: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        EngineConfig.from_dict(options)


def test_an_unknown_option_is_refused_with_the_nearest_known_one() -> None:
    with pytest.raises(ConfigError, match="did you mean 'page_size'"):
        EngineConfig.from_dict({"pagesize": 4})


def test_every_option_is_echoed() -> None:
    changed = {"page_size": 4, "seed": 3, "drafter": "ngram", "prefix_cache": False, "max_queue": 7}
    echoed = EngineConfig.from_dict(changed).to_dict()
    assert {name: echoed[name] for name in changed} == changed


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", 1.5), ("temperature", -0.1), ("temperature", float("nan")), ("top_k", -1),
        ("top_p", 0.0), ("top_p", 1.1), ("min_p", -0.1), ("min_p", 1.5), ("seed", -1), ("seed", 2**64), ("n", 0), ("stop", ("",)),
        ("stop_token_ids", (-1,)), ("temperature", "hot"), ("top_k", 2**63), ("max_tokens", 2**31), ("temperature", 10**400), ("stop", 5),
        ("stop", None), ("stop_token_ids", 7), ("stop_token_ids", (2**31,)), ("logit_bias", ((1,),)), ("logit_bias", {1: float("inf")}),
        ("logit_bias", 3), ("bad_words", ((),)), ("bad_words", (3,)), ("allowed_token_ids", ("a",)), ("min_tokens", -1), ("best_of", 0),
        ("repetition_penalty", 0.0), ("presence_penalty", 2.5), ("typical_p", 0.0), ("logprobs", 1000), ("verify_rule", "typical"),
        ("logits_processors", (3,)), ("constraint", "[0-9]+"),
    ],
)  # fmt: skip
def test_a_bad_sampling_parameter_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(RequestError, match=field) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field


def test_an_unknown_sampling_parameter_is_refused() -> None:
    with pytest.raises(RequestError, match="'temprature'"):
        SamplingParams.from_dict({"temprature": 1})


def test_one_stop_string_may_be_given_bare() -> None:
    assert SamplingParams(stop="ab").stop == ("ab",)  # type: ignore[arg-type]


def test_a_draft_budget_may_come_as_text() -> None:
    assert [EngineConfig(draft_budget=value).draft_budget for value in ("auto", "all", 5, "5")] == ["auto", "all", 5, 5]
