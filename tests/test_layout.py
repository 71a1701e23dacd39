"""The layout of the repository: links, import levels, and who may name torch, devices and generic module names."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "specdec"
LINKED = ("drafters", "verifier", "kv_manager", "scheduler", "eval")

# What may import what: a module imports its own level only within its package, or from a level below.
# Modules of one level in different groups do not import each other.
LEVELS: dict[str, int] = {
    **dict.fromkeys(("errors", "request", "tree", "plan", "config", "drafter_spec", "pack", "cache", "seeds"), 0),
    **dict.fromkeys(("kv_manager", "backend", "kernels", "quantization", "parallel"), 1),
    **dict.fromkeys(("models", "runner", "chat", "choices", "detokenizer", "memory", "step_clock"), 2),
    **dict.fromkeys(("drafters", "verifier", "scheduler"), 3),
    **dict.fromkeys(("engine", "output", "startup", "warm_up"), 4),
    **dict.fromkeys(("llm", "mailbox", "server", "testing"), 5),
    **dict.fromkeys(("cli", "eval", "__main__"), 6),
}
TORCH_FREE = ("scheduler", *(name for name, level in LEVELS.items() if level == 0))
FILES = sorted(path for path in PACKAGE.rglob("*.py") if "__pycache__" not in path.parts)
FILES += sorted(path for name in LINKED for path in (ROOT / name).rglob("*.py") if "__pycache__" not in path.parts)


def module_of(path: Path) -> tuple[str, ...]:
    """`specdec/models/decoder.py` and `drafters/base.py` -> the parts below `specdec`."""
    relative = path.relative_to(PACKAGE if path.is_relative_to(PACKAGE) else ROOT).with_suffix("")
    return tuple(part for part in relative.parts if part != "__init__")


def imports_of(path: Path) -> Iterator[tuple[str, bool]]:
    """(dotted module, whether it is imported when the file is): `from specdec import x` counts as `specdec.x`."""
    tree = ast.parse(path.read_text("utf-8"))
    late = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test))
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, id(node) not in late
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            if node.module == "specdec":
                for alias in node.names:
                    yield f"specdec.{alias.name}", id(node) not in late
            else:
                yield node.module, id(node) not in late


@pytest.mark.parametrize("name", LINKED)
def test_root_folders_are_linked_into_the_package(name: str) -> None:
    link = PACKAGE / name
    assert link.is_symlink()
    assert link.readlink() == Path("..") / name
    assert link.resolve() == (ROOT / name).resolve()
    assert (ROOT / name / "__init__.py").is_file()


def test_every_folder_with_modules_is_a_package() -> None:
    folders = {path.parent for path in FILES}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").is_file() and folder != PACKAGE] == []


def test_every_module_has_a_level() -> None:
    assert sorted({module_of(path)[0] for path in FILES if module_of(path)} - set(LEVELS)) == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down(path: Path) -> None:
    own = module_of(path)
    if not own:
        return  # the package itself re-exports lazily
    level = LEVELS[own[0]]
    wrong = []
    for name, _ in imports_of(path):
        parts = name.split(".")
        assert parts[0] not in LINKED, f"import specdec.{name}, not {name}"
        if parts[0] != "specdec" or len(parts) == 1 or parts[1] not in LEVELS:
            continue
        if LEVELS[parts[1]] > level:
            wrong.append(f"{name} is above")
        elif level == 3 and LEVELS[parts[1]] == 3 and parts[1] != own[0]:
            wrong.append(f"{name} is beside: drafters, verifier and scheduler never import each other")
    assert wrong == []


@pytest.mark.parametrize(
    "path", [p for p in FILES if module_of(p)[:1] and module_of(p)[0] in TORCH_FREE], ids=lambda p: str(p.relative_to(ROOT))
)
def test_torch_free_modules(path: Path) -> None:
    assert [name for name, _ in imports_of(path) if name.split(".")[0] in ("torch", "transformers")] == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_devices_are_named_in_the_backend_only(path: Path) -> None:
    own = module_of(path)
    if own == ("backend", "cuda") or own[:2] == ("kernels", "triton"):
        return
    tree = ast.parse(path.read_text("utf-8"))
    named = [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch.cuda")]
    assert named == [], "torch.cuda belongs into backend/cuda.py"
    assert [name for name, _ in imports_of(path) if name.split(".")[0] in ("flashinfer", "triton")] == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_module_says_what_it_is(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text("utf-8")))


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        *(
            [*command, "--help"]
            for command in (["generate"], ["serve"], ["bench"], ["simulate"], ["cache", "clear"], ["eval", "acceptance"])
        ),
    ],
)
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom specdec.cli import run\n"
        f"status = run({arguments!r})\n"
        "heavy = {'torch', 'transformers', 'numpy', 'fastapi', 'uvicorn', 'pydantic', 'gguf'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else status)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode == 0, result.stderr
    assert "Usage: specdec" in result.stdout


def test_public_names_resolve() -> None:
    import specdec

    for name in specdec.__all__:
        assert getattr(specdec, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = specdec.nothing
