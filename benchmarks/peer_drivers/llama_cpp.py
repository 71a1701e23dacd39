"""llama.cpp as a contender, by its own programs: llama-server, llama-batched-bench and llama-bench. Standard library only."""

from __future__ import annotations

import json
import socket
import subprocess
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from job import Answer, Job, Unsupported, run_job

_SLOT_TOKENS = 2048
_STEPS = 16  # timed per number of rows
_START_S = 300.0
_MODES = {
    "plain": (),
    "draft": ("--spec-type", "draft-simple", "--spec-draft-n-max", "8", "--spec-draft-p-min", "0.6"),
    "ngram": ("--spec-type", "ngram-simple"),
}


class LlamaCpp:
    """Programs run one at a time; the server only where the case is one of chats."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.folder = Path(job["binaries"])
        self.version = self._version()
        self.server = _Server(self._server_command()) if job["case"] in ("decode", "mix", "concurrency") else None

    def chat(self, text: str, max_tokens: int) -> Answer:
        """By the server's own clock, so that HTTP costs it nothing."""
        reply = self._server.chat(text, max_tokens)
        timings = reply["timings"]
        content = reply["choices"][0]["message"]["content"]
        return Answer(content, timings["predicted_n"], timings["prompt_ms"] / 1000, timings["predicted_ms"] / 1000)

    def chat_together(self, texts: list[str], max_tokens: int) -> tuple[int, float]:
        start = time.perf_counter()
        with ThreadPoolExecutor(len(texts)) as pool:
            replies = list(pool.map(lambda text: self._server.chat(text, max_tokens), texts))
        return sum(reply["usage"]["completion_tokens"] for reply in replies), time.perf_counter() - start

    def step_s(self, rows: list[int], context: int) -> dict[int, float]:
        """A row is a sequence of its own behind one shared prompt, since only then are the logits of all rows computed."""
        sizes = ("-npp", str(context), "-ntg", str(_STEPS), "-npl", ",".join(map(str, rows)), "-pps")
        room = ("-c", str(context + max(rows) * _STEPS + 64), "-b", "2048", "-kvu", "--output-format", "jsonl")
        lines = self._run("llama-batched-bench", "-m", self.job["model"], *self._threads(), *sizes, *room).splitlines()
        entries = [json.loads(line) for line in lines if line.startswith("{")]
        return {entry["pl"]: entry["t_tg"] / entry["tg"] for entry in entries}

    def prefill_s(self, tokens: int) -> float:
        output = self._run(
            "llama-bench", "-m", self.job["model"], "-t", str(self.job["threads"]), "-p", str(tokens), "-n", "0", "-r", "1", "-o", "json"
        )
        return tokens / json.loads(output)[0]["avg_ts"]

    def close(self) -> None:
        if self.server is not None:
            self.server.close()

    @property
    def _server(self) -> _Server:
        assert self.server is not None
        return self.server

    def _server_command(self) -> list[str]:
        mode, case = self.job["mode"], self.job["case"]
        slots = max(self.job["levels"]) if case == "concurrency" else 1
        command = [str(self._program("llama-server")), "-m", self.job["model"], *self._threads(), *_MODES[mode]]
        command += ["-c", str(slots * _SLOT_TOKENS), "-np", str(slots), "--jinja", "--host", "127.0.0.1"]
        if mode == "draft":
            if not self.job["draft"]:
                raise Unsupported("a draft model needs --draft")
            command += ["-md", self.job["draft"]]
        return command

    def _threads(self) -> tuple[str, ...]:
        threads = str(self.job["threads"])
        return ("-t", threads, "-tb", threads)

    def _version(self) -> str:
        found = subprocess.run([self._program("llama-server"), "--version"], capture_output=True, text=True, check=False)
        lines = [line for line in (found.stderr + found.stdout).splitlines() if line.startswith("version")]
        return f"llama.cpp {lines[0].partition(':')[2].strip()}" if lines else "llama.cpp"

    def _program(self, name: str) -> Path:
        path = self.folder / name
        if not path.is_file():
            raise Unsupported(f"{path} is not there")
        return path

    def _run(self, name: str, *arguments: str) -> str:
        found = subprocess.run([self._program(name), *arguments], capture_output=True, text=True, check=False)
        if found.returncode:
            raise Unsupported(f"{name} failed with code {found.returncode}: {found.stderr.strip()[-300:]}")
        return found.stdout


class _Server:
    """A llama-server on a free port; its log is read only where it fails."""

    def __init__(self, command: list[str]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed with the server
        self.process = subprocess.Popen([*command, "--port", str(port)], stdout=self.log, stderr=subprocess.STDOUT)
        try:
            self._wait()
        except BaseException:
            self.close()
            raise

    def chat(self, text: str, max_tokens: int) -> Any:  # the JSON of its reply
        body = {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": max_tokens, "cache_prompt": False}
        request = urllib.request.Request(f"{self.url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as reply:
            return json.load(reply)

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()
        self.log.close()

    def _wait(self) -> None:
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                self.log.seek(0)
                raise Unsupported(f"llama-server ended with code {self.process.returncode}: {self.log.read().strip()[-300:]}")
            try:
                with urllib.request.urlopen(f"{self.url}/health"):
                    return
            except OSError:
                time.sleep(0.1)
        raise Unsupported(f"llama-server was not ready after {_START_S:.0f} s")


if __name__ == "__main__":
    run_job(LlamaCpp)
