import pytest

from specdec.config import EngineConfig
from specdec.errors import ConfigError
from specdec.memory import ModelMemory, plan_memory

TARGET = ModelMemory("target", weight_bytes=1_000_000, page_bytes=1_000)
DRAFT = ModelMemory("draft", weight_bytes=100_000, page_bytes=200)


def test_the_default_pool_holds_every_request_at_full_length_where_memory_allows() -> None:
    config = EngineConfig(max_num_seqs=3, page_size=16)
    assert plan_memory(config, [TARGET], 100, free_bytes=10**9).num_pages == 3 * 7
    assert plan_memory(config, [TARGET], 100, free_bytes=1_000_000 + 40_000).num_pages == 10  # a quarter of what is left


def test_all_pools_share_the_stated_budget() -> None:
    plan = plan_memory(EngineConfig(kv_memory_gb=0.001), [TARGET, DRAFT], 100, free_bytes=10**9)
    assert plan.num_pages == 833 and plan.kv_bytes <= 10**6


def test_places_on_the_host_have_room_for_all_models_together() -> None:
    plan = plan_memory(EngineConfig(num_pages=10, swap_gb=0.001), [TARGET, DRAFT], 100, free_bytes=10**9)
    assert plan.swap_pages == 833 and plan.swap_bytes <= 10**6
    assert "swap 0.00 GB (833 pages)" in str(plan)
    assert "swap" not in str(plan_memory(EngineConfig(num_pages=10), [TARGET], 100, 10**9))


@pytest.mark.parametrize(
    ("config", "free", "message"),
    [
        (EngineConfig(max_model_len=101), 10**9, "at most 100"),
        (EngineConfig(num_pages=10**6), 10**8, "GB are needed"),
        (EngineConfig(), 1_000_100, "no page"),
        (EngineConfig(num_pages=10, swap_gb=1e-9), 10**8, "swap_gb"),
        (EngineConfig(num_pages=10, swap_gb=1.0), 10**9, "1.00 GB are needed"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers(config: EngineConfig, free: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_memory(config, [TARGET], 100, free)
