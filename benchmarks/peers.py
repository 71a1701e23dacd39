"""specdec against llama.cpp, transformers and OpenVINO GenAI on the same GGUF file: who is how fast on this machine.

    python benchmarks/peers.py --model MODEL.gguf [--draft DRAFT.gguf] --case decode --case steps ... [--prompts FILE.jsonl]
        [--llama-cpp FOLDER] [--transformers-python PYTHON] [--openvino-python PYTHON] [--rounds N] [--json FILE]

Peers run in environments of their own, or as programs; those that are not there are left out with a line that says so.
Every measurement, ours too, is a process of its own that loads, measures and ends. In each round all contenders take
their turn, and figures are medians over the rounds. `docs/benchmarks.md` says what each case measures.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specdec.eval.bench_prompts import SHIPPED
from specdec.eval.datasets import load_prompts
from specdec.eval.machine import BUSY_CORES, busy_cores, describe_machine
from specdec.eval.tables import align

DRIVERS = Path(__file__).parent / "peer_drivers"
CASES = ("decode", "steps", "prefill", "mix", "concurrency")
SECONDS = ("steps",)  # the figures of these cases are seconds, all others tokens per second
ROWS = (1, 2, 4, 8, 16, 32)
CONTEXT = 256
PREFILL_TOKENS = 512
LEVELS = (1, 4, 8, 16)
OURS = "specdec"


@dataclass(frozen=True)
class Program:
    """What takes part.

    Attributes:
        python: the interpreter that runs its driver; None where the program was not found.
        script: the driver.
        modes: label -> what the driver calls it; the first drafts nothing.
        together: labels that also count in the case concurrency.
    """

    name: str
    python: str | None
    script: str
    modes: dict[str, str]
    together: tuple[str, ...] = ()

    def modes_in(self, case: str) -> tuple[str, ...]:
        """Labels that count outside the mix."""
        return self.together if case == "concurrency" and self.together else tuple(self.modes)[:1]


@dataclass(frozen=True)
class Contender:
    """A program in one of its modes.

    Attributes:
        name: of the program, and of the mode where it has several in this case.
        command: that runs the driver.
        job: what the driver is to measure, without the model.
    """

    name: str
    command: tuple[str, ...]
    job: dict[str, Any]

    @property
    def is_ours(self) -> bool:
        return self.name.split()[0] == OURS


@dataclass
class Column:
    """What one contender came to: a figure per row of the table and round."""

    contender: Contender
    version: str = ""
    values: dict[str, list[float]] = field(default_factory=dict)
    first_s: dict[str, list[float]] = field(default_factory=dict)
    busy: list[float | None] = field(default_factory=list)  # cores, before each of its runs
    texts: dict[str, str] = field(default_factory=dict)
    error: str = ""

    def take(self, result: dict[str, Any]) -> None:
        if "error" in result:
            self.error = result["error"]
            return
        self.version = result["version"]
        for kept, found in ((self.values, result["values"]), (self.first_s, result.get("first_s", {}))):
            for row, value in found.items():
                kept.setdefault(row, []).append(value)
        self.texts = result.get("texts", {})


def main() -> None:
    options = parse_arguments()
    report: dict[str, Any] = {"case": describe(options), "results": []}
    present = programs(options)
    with tempfile.TemporaryDirectory() as scratch:
        work = options.work or Path(scratch)
        work.mkdir(parents=True, exist_ok=True)
        for model in options.model:
            for case in options.case:
                print(f"\n{model.name}, {case}", flush=True)
                columns = measure(case, model, contenders(case, present, options), options, work)
                print(format_table(case, columns), flush=True)
                report["results"] += [entry for column in columns for entry in to_json(model, case, column)]
                if options.json:
                    options.json.write_text(json.dumps(report, indent=2) + "\n", "utf-8")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, action="append", required=True, help="GGUF file; may be repeated")
    parser.add_argument("--draft", type=Path, help="GGUF file of a draft model, for the case mix")
    parser.add_argument("--case", action="append", choices=CASES, required=True, help="may be repeated")
    parser.add_argument("--prompts", type=Path, help='for the case mix: JSON lines of {"id", "category", "turns"}; default: built-in ones')
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="only contenders with this in their names")
    parser.add_argument("--llama-cpp", type=Path, metavar="FOLDER", help="with llama-server, llama-bench and llama-batched-bench")
    parser.add_argument("--transformers-python", metavar="PYTHON", help="an interpreter that has transformers and torch")
    parser.add_argument("--openvino-python", metavar="PYTHON", help="an interpreter that has openvino-genai")
    parser.add_argument("--dtype", default="auto", help="of specdec; the peers have what their modes say")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=128, help="per answer; half of it in the case concurrency")
    parser.add_argument("--work", type=Path, metavar="FOLDER", help="keeps what a peer has to convert, for the next time")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    for path in (*options.model, *filter(None, (options.draft, options.prompts))):
        if not path.is_file():
            parser.error(f"{path}: no such file")
    if options.llama_cpp is None and (found := shutil.which("llama-server")):
        options.llama_cpp = Path(found).parent
    return options


def programs(options: argparse.Namespace) -> list[Program]:
    """specdec, and the peers that are there. Says who is not, and how to name them."""
    draft = str(options.draft) if options.draft else None
    ours = {"off": "off", "ngram": "ngram"}
    ours |= {"draft": f"model:{draft}", "ngram+draft": f"ngram+model:{draft}"} if draft else {}
    lookup, drafts = {"plain": "plain", "lookup": "lookup"}, {"draft": "draft"} if draft else {}
    llama = sys.executable if options.llama_cpp else None
    found = [Program(OURS, sys.executable, "ours.py", ours, together=("off", "ngram"))]
    for flag, program in (
        ("--llama-cpp FOLDER", Program("llama.cpp", llama, "llama_cpp.py", {"plain": "plain", "ngram": "ngram", **drafts})),
        ("--transformers-python PYTHON", Program("transformers", options.transformers_python, "transformers_generate.py", lookup | drafts)),
        ("--openvino-python PYTHON", Program("openvino", options.openvino_python, "openvino_genai_pipeline.py", lookup | drafts)),
    ):
        if program.python is None:
            print(f"{program.name}: left out, since it was not found; give {flag}")
        else:
            found.append(program)
    return found


def contenders(case: str, found: Sequence[Program], options: argparse.Namespace) -> list[Contender]:
    """Every program in the modes that count in this case: all in the mix, elsewhere those without drafts."""
    parties = []
    for program in found:
        modes = program.modes if case == "mix" else {name: program.modes[name] for name in program.modes_in(case)}
        for label, mode in modes.items():
            name = f"{program.name} {label}" if len(modes) > 1 else program.name
            job = {"mode": mode, "binaries": str(options.llama_cpp), "dtype": options.dtype}
            parties.append(Contender(name, (str(program.python), str(DRIVERS / program.script)), job))
    return [one for one in parties if not options.only or any(part in one.name for part in options.only)]


def measure(case: str, model: Path, found: Sequence[Contender], options: argparse.Namespace, work: Path) -> list[Column]:
    """All rounds. A contender that fails says why and is not asked again."""
    columns = [Column(contender) for contender in found]
    job = {
        "case": case,
        "model": str(model),
        "draft": str(options.draft) if options.draft else None,
        "threads": options.threads,
        "prompts": prompts(case, options),
        "max_tokens": options.max_tokens // 2 if case == "concurrency" else options.max_tokens,
        "rows": ROWS,
        "context": CONTEXT,
        "tokens": PREFILL_TOKENS,
        "levels": LEVELS,
        "work": str(work),
    }
    for number in range(options.rounds):
        for column in columns:
            if not column.error:
                print(f"  round {number + 1} of {options.rounds}: {column.contender.name}", file=sys.stderr, flush=True)
                column.busy.append(busy_cores())
                column.take(run_driver(column.contender, {**job, **column.contender.job}))
                if column.error:
                    print(f"{column.contender.name}: left out: {column.error}", flush=True)
    return [column for column in columns if not column.error]


def prompts(case: str, options: argparse.Namespace) -> list[tuple[str, str]]:
    """(id, text): the file's in the case mix, else built-in ones, in the case decode a single one."""
    rows = load_prompts([options.prompts]) if case == "mix" and options.prompts else SHIPPED
    chosen = rows[1:2] if case == "decode" else rows
    return [(row.id, row.turns[0]) for row in chosen]


def run_driver(contender: Contender, job: dict[str, Any]) -> dict[str, Any]:
    """Runs one measurement in its own process; a dictionary with `error` where nothing came of it."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(job["threads"]), "HF_HUB_OFFLINE": "1"}
    try:
        found = subprocess.run(contender.command, input=json.dumps(job), capture_output=True, text=True, check=False, env=environment)
    except OSError as error:
        return {"error": f"{contender.command[0]} cannot be run: {error.strerror}"}
    lines = found.stdout.strip().splitlines()
    if found.returncode or not lines:
        reason = (found.stderr.strip().splitlines() or ["it said nothing"])[-1]
        return {"error": f"its driver failed with code {found.returncode}: {reason[:300]}"}
    result: dict[str, Any] = json.loads(lines[-1])
    return result


def format_table(case: str, columns: Sequence[Column]) -> str:
    """Medians, a column per contender, and the best of ours against the best peer, round by round."""
    names = list(dict.fromkeys(row for column in columns for row in column.values))
    if not names:
        return "nothing was measured"
    unit = "ms" if case in SECONDS else "tokens/s"
    table = [[unit, *(column.contender.name for column in columns), "ours / best peer"]]
    for row in names:
        cells = [cell(case, column, row, names[0]) for column in columns]
        table.append([row, *cells, comparison(case, columns, row)])
    versions = dict.fromkeys(column.version for column in columns)
    notes = [f"{column.contender.name}: another text than plain on {count} prompts" for column, count in differing(columns)]
    busiest = max((cores for column in columns for cores in column.busy if cores is not None), default=0.0)
    if busiest > BUSY_CORES:
        notes.append(
            f"other programs kept up to {busiest:.1f} cores busy, which costs those most whose threads spin: not a fair comparison"
        )
    return "\n".join([align(table), "; ".join(versions), *notes])


def cell(case: str, column: Column, row: str, first: str) -> str:
    values = column.values.get(row)
    if values is None:
        return "-"
    middle = statistics.median(values)
    if case not in SECONDS:
        return f"{middle:.1f}"
    return f"{1000 * middle:.1f} ({middle / statistics.median(column.values[first]):.2f}x)"


def comparison(case: str, columns: Sequence[Column], row: str) -> str:
    """How many times as fast the best of ours is as the best peer; both are chosen by their medians."""
    have = [column for column in columns if row in column.values]
    ours, peers = ([column for column in have if column.contender.is_ours is own] for own in (True, False))
    if not ours or not peers:
        return "-"
    best = min if case in SECONDS else max
    own, other = (best(group, key=lambda column: statistics.median(column.values[row])).values[row] for group in (ours, peers))
    ratios = [mine / theirs for mine, theirs in zip(own, other, strict=False)]
    middle = statistics.median(ratios)
    return f"{1 / middle if case in SECONDS else middle:.2f}x"


def differing(columns: Sequence[Column]) -> Iterable[tuple[Column, int]]:
    """Contenders whose texts are not those of the same program without speculation."""
    plain = {column.contender.name.split()[0]: column.texts for column in columns if column.contender.job["mode"] in ("off", "plain")}
    for column in columns:
        wanted = plain.get(column.contender.name.split()[0], {})
        count = sum(text != wanted[name] for name, text in column.texts.items() if name in wanted)
        if count:
            yield column, count


def to_json(model: Path, case: str, column: Column) -> list[dict[str, Any]]:
    unit = "seconds" if case in SECONDS else "tokens_per_s"
    return [
        {
            "model": model.name,
            "case": case,
            "contender": column.contender.name,
            "version": column.version,
            "row": row,
            "unit": unit,
            "median": statistics.median(values),
            "samples": values,
            "busy_cores": column.busy,
            **({"first_token_s": statistics.median(column.first_s[row])} if row in column.first_s else {}),
        }
        for row, values in column.values.items()
    ]


def describe(options: argparse.Namespace) -> dict[str, Any]:
    given = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
    return {**given, "model": [str(path) for path in options.model], "machine": describe_machine(), "figures": "observed"}


if __name__ == "__main__":
    main()
