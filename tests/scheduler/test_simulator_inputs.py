"""Traces, acceptance laws and charts of the simulator."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest

from specdec.errors import ConfigError
from specdec.scheduler.simulator.acceptance_law import AcceptanceLaw, Category, parse_acceptance
from specdec.scheduler.simulator.chart import Line, Panel, draw
from specdec.scheduler.simulator.traces import HASH_BLOCK_TOKENS, TraceRequest, read_trace, speed_up


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def test_azure_trace(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.csv",
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "2023-11-16 18:17:03.9799600,4808,10",
        "2023-11-16 18:17:05.4799600,3180,8",
    )
    assert read_trace(path) == [TraceRequest(0.0, 4808, 10), TraceRequest(pytest.approx(1.5), 3180, 8)]
    assert len(read_trace(path, limit=1)) == 1


def test_mooncake_trace(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 500, "input_length": 700, "output_length": 5, "hash_ids": [0, 1]},
        {"timestamp": 2500, "input_length": 600, "output_length": 6, "hash_ids": [0, 2]},
    ]
    first, second = read_trace(write(tmp_path / "t.jsonl", *map(json.dumps, lines)))
    assert (first.arrival_s, second.arrival_s) == (0.0, 2.0)
    prompts = first.prompt(unique=10), second.prompt(unique=11)
    assert [len(prompt) for prompt in prompts] == [700, 600]
    same = [a == b for a, b in zip(*prompts, strict=False)]
    assert same == [True] * HASH_BLOCK_TOKENS + [False] * (600 - HASH_BLOCK_TOKENS)


def test_plain_trace_in_order_of_arrival(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", "ARRIVAL_S,PROMPT_TOKENS,OUTPUT_TOKENS", "7.5,10,3", "5,20,4")
    assert read_trace(path) == [TraceRequest(0.0, 20, 4), TraceRequest(2.5, 10, 3)]
    assert [request.arrival_s for request in speed_up(read_trace(path), 2.0)] == [0.0, 1.25]


def test_prompts_without_blocks_share_nothing() -> None:
    request = TraceRequest(0.0, 40, 1)
    assert request.prompt(5)[0] != request.prompt(6)[0]
    assert len(request.prompt(5)) == 40


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (("a,b",), "unknown format"),
        (("ARRIVAL_S,PROMPT_TOKENS,OUTPUT_TOKENS",), "holds no request"),
        (("ARRIVAL_S,PROMPT_TOKENS,OUTPUT_TOKENS", "0,5,5", "1,x,5"), "request 2 of the trace .* is wrong"),
        (("ARRIVAL_S,PROMPT_TOKENS,OUTPUT_TOKENS", "0,5,0"), "5 prompt and 0 generated tokens"),
        (('{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1]}',), "need 2 hash_ids, got 1"),
        (('{"timestamp": 0}',), "request 1 of the trace .* KeyError"),
        (("TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:17:03.97,5"), "IndexError"),
        (("ARRIVAL_S,PROMPT_TOKENS,OUTPUT_TOKENS", "0,5,5", "inf,5,5"), "request 2 of the trace .* must come within 1e.11 s, got inf"),
        (("ARRIVAL_S,PROMPT_TOKENS,OUTPUT_TOKENS", "nan,5,5"), "must come within 1e.11 s, got nan"),
        (("ARRIVAL_S,PROMPT_TOKENS,OUTPUT_TOKENS", "0,1000000000,5"), "needs 1 to 10000000 of each, got 1000000000 prompt and 5"),
        (("ARRIVAL_S,PROMPT_TOKENS,OUTPUT_TOKENS", "0,5," + "9" * 400), "5 prompt and a number of 400 digits generated tokens"),
        (('{"timestamp": 1, "input_length": Infinity, "output_length": 5}',), "request 1 of the trace .* OverflowError"),
    ],
)
def test_wrong_traces_are_told_where(tmp_path: Path, lines: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_trace(write(tmp_path / "t", *lines))


def test_a_trace_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="cannot read the trace"):
        read_trace(Path("/nowhere/t.csv"))


def test_fates_follow_the_rates_by_depth() -> None:
    law = AcceptanceLaw([Category("all", (0.8, 0.5))], seed=1)
    fates = [law.fate(number, 400) for number in range(100)]
    counts = Counter(fate.accepted(position, 3) for fate in fates for position in range(390))
    total = counts.total()
    assert counts[0] / total == pytest.approx(0.2, abs=0.01)
    assert counts[1] / total == pytest.approx(0.8 * 0.5, abs=0.01)
    assert counts[3] / total == pytest.approx(0.8 * 0.5 * 0.5, abs=0.01)  # the last rate holds below


def test_fates_belong_to_request_and_position() -> None:
    law = AcceptanceLaw([Category("all", (0.6,))], seed=1)
    fate, again, other = law.fate(3, 50), law.fate(3, 50), law.fate(4, 50)
    full = [fate.accepted(position, 8) for position in range(50)]
    assert full == [again.accepted(position, 8) for position in range(50)]
    assert full != [other.accepted(position, 8) for position in range(50)]
    assert [fate.accepted(position, 2) for position in range(50)] == [min(count, 2) for count in full]
    assert all(fate.accepted(position, 8) <= 50 - position for position in range(50))


def test_categories_get_their_shares() -> None:
    law = AcceptanceLaw([Category("a", (1.0,), share=3), Category("b", (0.0,), share=1)])
    counts = Counter(law.fate(number, 1).category.name for number in range(2000))
    assert counts["a"] / 2000 == pytest.approx(0.75, abs=0.03)


def test_acceptance_texts_and_files(tmp_path: Path) -> None:
    assert parse_acceptance("0.6") == [Category("all", (0.6,))]
    assert parse_acceptance("0.8,0.5") == [Category("all", (0.8, 0.5))]
    path = tmp_path / "a.json"
    path.write_text('{"code": {"rates": [0.9, 0.8], "share": 2}, "chat": 0.5, "maths": [0.7]}')
    assert parse_acceptance(str(path)) == [Category("code", (0.9, 0.8), 2.0), Category("chat", (0.5,)), Category("maths", (0.7,))]


@pytest.mark.parametrize(
    ("text", "words"),
    [("high", "a rate such as 0.6"), ("1.2", "between 0 and 1"), ("/nowhere/a.json", "cannot read acceptance rates")],
)
def test_wrong_acceptance(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_acceptance(text)


@pytest.mark.parametrize("text", ["[]", "{", '{"a": {"share": 1}}', '{"a": "x"}', '{"a": {"rates": [0.5], "share": 0}}', '{"a": []}', "{}"])
def test_wrong_acceptance_files(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(ConfigError):
        AcceptanceLaw(parse_acceptance(str(path)))


def test_charts_are_svg_with_a_line_each() -> None:
    panels = [
        Panel("speed <1>", "x", [Line("a & b", [(1, 2.0), (2, None), (4, 3.0)]), Line("c", [(1, 1.0), (4, 1.0)], bold=True)], log_x=True),
        Panel("flat", "x", [Line("d", [(0, 0.0), (1, 0.0)])]),
        Panel("nothing", "x", []),
    ]
    root = ElementTree.fromstring(draw(panels))
    texts = [element.text for element in root.iter() if element.text]
    for text in ("speed <1>", "a & b", "c", "flat", "nothing"):
        assert text in texts
    lines = [element.get("d", "") for element in root.iter() if element.get("fill") == "none"]
    assert len(lines) == 3
    assert lines[0].count("M") == 2  # broken where there is no value
