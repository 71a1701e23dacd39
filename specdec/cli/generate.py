"""`specdec generate`: one prompt to the terminal, accepted draft tokens in colour."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specdec.cli.constraint import constraint_options
from specdec.cli.options import engine_options, sampling_options
from specdec.config import EngineConfig
from specdec.drafter_spec import parse_drafter_spec
from specdec.errors import ConfigError, SpecdecError
from specdec.request import RequestStats, SamplingParams

if TYPE_CHECKING:
    from specdec.engine import Engine
    from specdec.plan import Event, TokenLogprobs


@dataclass
class Choice:
    """One choice as it comes in."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    stats: RequestStats = field(default_factory=RequestStats)
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    def take(self, event: Event) -> None:
        self.logprobs += event.logprobs
        self.token_ids += event.token_ids
        self.text += event.text
        self.finish_reason = event.finish_reason
        self.stats = event.stats

    def to_dict(self, seconds: float) -> dict[str, Any]:
        """The JSON object of `--json`; tokens_per_s is over the wall time of the run, prefill included."""
        stats = self.stats
        scores = [{"token_id": entry.token, "logprob": entry.logprob, "top": entry.top} for entry in self.logprobs]
        return {
            **({"logprobs": scores} if scores else {}),
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
            "stats": {
                "drafted": stats.drafted,
                "accepted": stats.accepted,
                "acceptance_length": stats.acceptance_length,
                "draft_s": stats.draft_s,
                "verify_s": stats.verify_s,
                "tokens_per_s": len(self.token_ids) / seconds,
            },
        }


@click.command("generate", short_help="Generate text in the terminal.")
@engine_options()
@click.option("--prompt", "-p", required=True, help="The prompt; '-' reads it from standard input.")
@click.option("--chat/--raw", default=None, help="Apply the model's chat template, or not. By default, if it has one.")
@click.option("--system", help="A system message to go before the prompt.")
@sampling_options
@constraint_options
@click.option(
    "--prediction",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A file with the predicted output, for the drafter 'prediction' (taken by itself if no drafter is named).",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per choice instead of text.")
def command(
    config: EngineConfig, prompt: str, chat: bool | None, system: str | None, prediction: Path | None, as_json: bool, **sampling: Any
) -> int:
    """Generate text from MODEL: a hub id, a folder, a .gguf file, or the demo model.

    Accepted draft tokens are green; tokens that the model itself chose are plain. The last line, on standard error,
    gives speed, acceptance length, and where the time went.
    """
    params = SamplingParams(seed=config.seed, **sampling)
    if params.logprobs is not None and not as_json:
        raise ConfigError("--logprobs are printed with --json only: add it")
    if prediction is not None:
        config = with_prediction_drafter(config)
    text = sys.stdin.read() if prompt == "-" else prompt

    from specdec.engine import Engine

    engine = Engine.from_config(config, progress=lambda line: click.echo(line, err=True))
    try:
        ids = prompt_ids(engine, text, system, chat)
        predicted = encode(engine, prediction.read_text("utf-8"), special=False) if prediction is not None else []
        start = time.perf_counter()
        choices = _generate(engine, ids, params, predicted, show=not as_json)
        seconds = time.perf_counter() - start
    finally:
        engine.close()
    if as_json:
        for choice in choices:
            click.echo(json.dumps(choice.to_dict(seconds), ensure_ascii=False))
    else:
        click.echo(summary(choices, seconds), err=True)
    return 0


def with_prediction_drafter(config: EngineConfig) -> EngineConfig:
    """The config with a drafter that reads the predicted output; the user's own, if any is set."""
    if config.drafter == "off":
        return replace(config, drafter="prediction")
    names = [part.name for part in parse_drafter_spec(config.drafter)]
    if "ngram" in names and "prediction" not in names:
        raise ConfigError(
            f"--prediction is not read by the drafter {config.drafter!r}: add 'prediction', as in 'prediction+{config.drafter}'"
        )
    return config


def prompt_ids(engine: Engine, text: str, system: str | None, chat: bool | None) -> list[int]:
    """The prompt as ids, by the chat template unless the model has none or `chat` is False."""
    from specdec.chat import encode_chat, has_chat_template

    if chat is None:
        chat = has_chat_template(engine.tokenizer)
    if chat:
        messages = [{"role": "system", "content": system}] if system is not None else []
        return encode_chat(engine.tokenizer, [*messages, {"role": "user", "content": text}])
    if system is not None:
        raise ConfigError("--system needs a chat template: this prompt is raw (the model has none, or --raw was given)")
    return encode(engine, text, special=True)


def encode(engine: Engine, text: str, *, special: bool) -> list[int]:
    if engine.tokenizer is None:
        raise ConfigError("the model comes without a tokenizer, so it cannot take text: use specdec.LLM with token ids")
    return list(engine.tokenizer.encode(text, add_special_tokens=special))


def _generate(engine: Engine, ids: Sequence[int], params: SamplingParams, predicted: Sequence[int], *, show: bool) -> list[Choice]:
    """Runs the request to its end. With `show`, the text streams to stdout: the first choice live, the others after it."""
    choices = {request_id: Choice() for request_id in engine.add(ids, params, prediction=predicted)}
    held: dict[str, list[Event]] = {request_id: [] for request_id in choices}
    order = list(choices)
    shown = 0
    while engine.has_work:
        for event in engine.step():
            choices[event.request_id].take(event)
            held[event.request_id].append(event)
            if event.error is not None:
                raise SpecdecError(f"generation failed: {event.error}")
        while show and shown < len(order):
            for event in held[order[shown]]:
                _show(event)
            held[order[shown]].clear()
            if choices[order[shown]].finish_reason is None:
                break
            click.echo()
            shown += 1
            if shown < len(order):
                click.secho(f"--- choice {shown + 1} ---", dim=True)
    return list(choices.values())


def _show(event: Event) -> None:
    for index, piece in enumerate(event.pieces):
        click.echo(click.style(piece, fg="green") if piece and index < event.num_accepted else piece, nl=False)


def summary(choices: Sequence[Choice], seconds: float) -> str:
    """The closing line: speed once the prompt was read, pooled acceptance length, and where the seconds went."""
    tokens = sum(len(choice.token_ids) for choice in choices)
    verifies = sum(choice.stats.verifies for choice in choices)
    length = sum(choice.stats.emitted for choice in choices) / verifies if verifies else 1.0
    draft = sum(choice.stats.draft_s for choice in choices)
    verify = sum(choice.stats.verify_s for choice in choices)
    prefill = sum(choice.stats.prefill_s for choice in choices)
    other = max(0.0, seconds - prefill - draft - verify)
    decoding = max(1e-9, seconds - prefill)
    return (
        f"{tokens} tokens, {tokens / decoding:.1f} tokens/s after {prefill:.2f} s of prefill, acceptance length {length:.2f}; "
        f"draft {draft:.2f} s, verify {verify:.2f} s, other {other:.2f} s"
    )
