"""`specdec eval acceptance`: same prompts and seeds for all drafters, pooled counts, identity with `off`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specdec.cli import run
from specdec.config import EngineConfig
from specdec.drafters.registry import register_drafter, unregister
from specdec.errors import ContextLengthError
from specdec.eval.acceptance import Evaluation, Settings, run_acceptance
from specdec.eval.datasets import PromptRow
from specdec.eval.report import build_report, format_table

ROWS = [
    PromptRow("one", "chat", ("hello", "and then?")),
    PromptRow("two", "code", ("def f():",), raw=True, prediction="pass"),
]


def evaluate(drafters: list[str], rows: list[PromptRow] = ROWS, **settings: Any) -> Evaluation:
    return run_acceptance(EngineConfig(), drafters, rows, Settings(**{"max_tokens": 13, **settings}))


def requests(log: list[Any], drafter: str) -> list[Any]:
    """What was really run, warm-up left out."""
    return [entry for entry in log if entry[0] == drafter and entry[2].max_tokens == 13]


def test_all_drafters_see_the_same_prompts_and_seeds(engines: list[Any]) -> None:
    evaluation = evaluate(["ngram"], seed=40)
    (engine,) = engines
    off, ngram = requests(engine.log, "off"), requests(engine.log, "ngram")
    assert [entry[1:] for entry in off] == [entry[1:] for entry in ngram]
    assert [entry[2].seed for entry in off] == [40, 41, 40]
    answer = evaluation.runs[0].answers[0].text
    tokenizer = engine.tokenizer
    assert off[0][1] == tuple(tokenizer.encode("<u>hello", add_special_tokens=False))
    assert off[1][1] == tuple(tokenizer.encode("def f():"))
    assert off[2][1] == tuple(tokenizer.encode(f"<u>hello<a>{answer}<u>and then?", add_special_tokens=False))
    assert off[1][3] == tuple(tokenizer.encode("pass", add_special_tokens=False))


def test_prefix_cache_is_reset_before_each_run_and_after_warm_up(engines: list[Any]) -> None:
    evaluate(["ngram"])
    log = [entry if isinstance(entry, str) else f"{entry[0]} {entry[2].max_tokens}" for entry in engines[0].log]
    first = log.index("ngram 8")
    assert log[:2] == ["off 8", "reset"]
    assert log[first - 1 : first + 3] == ["reset", "ngram 8", "reset", "ngram 13"]


def test_counts_are_pooled(engines: list[Any]) -> None:
    report = build_report(evaluate(["ngram"]), EngineConfig(), Settings(max_tokens=13), data=[Path("x.jsonl")], limit=3)
    off, ngram = report["results"]
    assert [off["drafter"], ngram["drafter"]] == ["off", "ngram"]
    assert off["acceptance_length"] == 1.0
    assert off["emitted"] == ngram["emitted"] == 3 * 12
    assert ngram["acceptance_length"] == 3.0
    assert ngram["drafted"] == 36
    assert ngram["accepted"] == 24
    assert ngram["verify_s"] == pytest.approx(0.12)
    assert ngram["identical_to_off"] is True
    assert ngram["first_divergence"] is None
    assert list(ngram["categories"]) == ["chat", "code"]
    assert ngram["categories"]["chat"]["requests"] == 2
    assert off["speedup"] == 1.0
    assert ngram["speedup"] == ngram["tokens_per_s"] / off["tokens_per_s"]
    wanted = {"drafter", "rule", "temperature", "acceptance_length", "drafted", "accepted", "emitted", "draft_s", "verify_s"}
    assert wanted | {"tokens_per_s", "speedup", "identical_to_off", "categories"} <= set(ngram)
    assert {"config", "model", "data", "limit", "versions", "machine", "max_tokens", "seed"} <= set(report["case"])


def test_divergence_is_found_and_placed(engines: list[Any]) -> None:
    evaluation = evaluate(["broken", "ngram"])
    report = build_report(evaluation, EngineConfig(), Settings(), data=[], limit=None)
    broken = report["results"][1]
    assert broken["identical_to_off"] is False
    assert broken["differing"] == 3
    wanted = evaluation.runs[0].answers[0].token_ids[3]
    assert broken["first_divergence"] == {"id": "one", "turn": 0, "position": 3, "expected": wanted, "got": 65}
    table = format_table(report)
    assert "NO, 3 of 3 differ" in table
    assert f"broken first differs from off in one, turn 1, token 3: {wanted} became 65" in table


def test_table_leaves_folders_out(engines: list[Any]) -> None:
    spec = "model:/some/folder/draft.gguf(depth=3)+ngram"
    report = build_report(evaluate([spec]), EngineConfig(), Settings(), data=[], limit=None)
    assert report["results"][1]["drafter"] == spec
    assert "model:draft.gguf(depth=3)+ngram" in format_table(report)
    assert "/some/folder" not in format_table(report)


def test_all_of_a_draft_is_verified_unless_the_engine_is_to_choose(engines: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    command = ["eval", "acceptance", "--drafter", "ngram", "--data", "x.jsonl", "--show-config"]
    for options, budget in (([], "all"), (["--draft-budget", "auto"], "auto"), (["--draft-budget", "3"], 3)):
        assert run([*command, *options]) == 0
        assert json.loads(capsys.readouterr().out)["draft_budget"] == budget
        config = EngineConfig(draft_budget=budget)
        evaluation = run_acceptance(config, ["ngram"], ROWS, Settings(max_tokens=13))
        assert engines[-1].config.draft_budget == budget
        told = format_table(build_report(evaluation, config, Settings(max_tokens=13), data=[], limit=None))
        assert ("whether it pays or not" in told) == (budget == "all")


def test_engines_are_shared_where_no_weights_are_loaded(engines: list[Any]) -> None:
    evaluation = evaluate(["ngram", "model:/a", "off", "model:/b", "ngram"])
    assert [run.drafter for run in evaluation.runs] == ["off", "ngram", "model:/a", "model:/b"]
    assert [engine.config.drafter for engine in engines] == ["model:/a", "model:/b"]
    assert all(engine.log[-1] == "close" for engine in engines)
    assert {entry[0] for entry in engines[1].log if not isinstance(entry, str)} == {"model:/b"}


def test_batch_keeps_so_many_in_flight(engines: list[Any]) -> None:
    rows = [PromptRow(str(i), "c", ("x" * (i + 1),)) for i in range(7)]
    one = evaluate(["ngram"], rows)
    three = evaluate(["ngram"], rows, batch=3)
    assert [engine.most_at_once for engine in engines] == [1, 3]
    assert [a.token_ids for a in one.runs[1].answers] == [a.token_ids for a in three.runs[1].answers]


def test_rows_that_do_not_fit_are_reported(engines: list[Any]) -> None:
    evaluation = evaluate(["ngram"], [*ROWS, PromptRow("long", "chat", ("x" * 300, "more"))])
    assert evaluation.skipped == ("long",)
    assert len(evaluation.runs[1].cases) == 3
    with pytest.raises(ContextLengthError, match="none of the 1 prompts fits"):
        evaluate(["ngram"], [PromptRow("long", "chat", ("x" * 300,))])


def test_command(engines: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, output = tmp_path / "prompts.jsonl", tmp_path / "out.json"
    data.write_text('{"id": "a", "category": "c", "turns": ["hi"]}\n{"id": "b", "category": "c", "turns": ["ho"]}\n')
    common = ["eval", "acceptance", "scripted", "--data", str(data), "--limit", "1", "--max-tokens", "13", "--rule", "coupled"]
    assert run([*common, "--drafter", "ngram", "--json", str(output)]) == 0
    shown = capsys.readouterr()
    assert "ngram" in shown.out
    assert "ngram: 1 requests done" in shown.err
    assert json.loads(output.read_text())["case"]["limit"] == 1
    register_drafter("broken", lambda tokens, limit: [])
    try:
        assert run([*common, "--drafter", "broken"]) == 1
    finally:
        unregister("broken")
    capsys.readouterr()
    assert run([*common, "--drafter", "ngrm"]) == 2
    assert "did you mean 'ngram'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--drafter", "a(b", "--data", "x"], "expected NAME"),
        (["--drafter", "ngram", "--data", "/nowhere/x.jsonl"], "/nowhere/x.jsonl"),
        (["--drafter", "ngram", "--data", "x", "--batch", "99"], "--max-num-seqs"),
        (["--drafter", "ngram", "--data", "x", "--json", "/nowhere/out.json"], "/nowhere"),
        (["--data", "x"], "--drafter"),
        (["--drafter", "ngram", "--data", "x", "--rule", "lucky"], "coupled"),
    ],
)
def test_command_errors(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["eval", "acceptance", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("specdec: error: ")
    assert error.count("\n") == 1
    assert message in error
