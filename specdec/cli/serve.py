"""`specdec serve`: the OpenAI-compatible server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from specdec.cli.options import engine_options
from specdec.config import EngineConfig
from specdec.errors import ConfigError
from specdec.server.options import ServerOptions


def _server_options(options: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"server": ServerOptions(**{name: value for name, value in options.items() if name != "log_level"}).to_dict()}


@click.command("serve", short_help="Serve an OpenAI-compatible API.")
@engine_options(extra=_server_options)
@click.option("--host", default=ServerOptions.host, show_default=True, help="Address to bind.")
@click.option("--port", type=int, default=ServerOptions.port, show_default=True, help="Port to bind; 0 takes a free one.")
@click.option("--served-model-name", help="The name that requests give as model; by default the model's own.")
@click.option(
    "--max-body-bytes", type=int, default=ServerOptions.max_body_bytes, show_default=True, help="Larger bodies are refused with 413."
)
@click.option(
    "--stall-s",
    type=float,
    default=ServerOptions.stall_s,
    show_default=True,
    help="/health is 503 when requests run and none has got a token for this many seconds.",
)
@click.option("--log-level", type=click.Choice(["critical", "error", "warning", "info", "debug"]), default="info", show_default=True)
def command(config: EngineConfig, log_level: str, **server: Any) -> int:
    """Serve MODEL over an OpenAI-compatible API: a hub id, a folder, a .gguf file, or the demo model."""
    options = ServerOptions(**server)
    try:
        from specdec.server.run import bind
        from specdec.server.run import serve as run_server
    except ImportError as error:
        raise ConfigError(f"serving needs the extra 'serve' ({error.name} is missing): pip install 'specdec[serve]'") from None

    listener = bind(options)
    with listener:
        from specdec.engine import Engine

        engine = Engine.from_config(config, progress=lambda line: click.echo(line, err=True))
        host, port = listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        name = options.served_model_name or engine.model_name
        click.echo(f"serving {name} on http://{shown}:{port}/v1 (drafter {config.drafter}); Ctrl-C stops", err=True)
        run_server(engine, options, listener, log_level=log_level)
    return 0
