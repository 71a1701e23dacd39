"""Constraints by themselves: grammars, masks at every node of a tree, completion, markers, limits."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from specdec.errors import RequestError
from specdec.request import Constraint, Request, SamplingParams
from specdec.tree import EMPTY, DraftTree
from specdec.verifier.constraints import ConstraintState, Grammar, GrammarCompiler, compiler
from specdec.verifier.constraints.marker import Marker
from tests.tiny_tokenizer import END, THINK, tiny_tokenizer

SIZE = 512
TOKENIZER = tiny_tokenizer()


def make_compiler(tokenizer: Any = TOKENIZER, size: int = SIZE, ends: Sequence[int] = (END,), **limits: Any) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, size, ends, **{"max_bytes": 1 << 16, "timeout_s": 20.0, **limits})


COMPILER = make_compiler()


def ids(text: str) -> list[int]:
    found: list[int] = TOKENIZER.encode(text, add_special_tokens=False)
    return found


def make_state(constraint: Constraint, *, own: GrammarCompiler = COMPILER, ends: Sequence[int] = (END,), **params: Any) -> ConstraintState:
    request = Request("r", [5], 1, SamplingParams(constraint=constraint, **params), 0, 100, eos_token_ids=frozenset(ends))
    return ConstraintState(*own.compile(constraint), request)


def legal(state: ConstraintState, tree: DraftTree = EMPTY, node: int = -1, size: int = SIZE) -> set[int]:
    """Ids that may follow a node."""
    words = state.masks(tree).words
    if words is None:
        return set(range(size))
    bits = np.unpackbits(words[node + 1].view(np.uint8), bitorder="little")
    assert not bits[size:].any(), "an id beyond the vocabulary"
    return set(np.flatnonzero(bits).tolist())


def texts(tokens: set[int]) -> set[str]:
    return {TOKENIZER.decode([token]) for token in tokens}


def matches(constraint: Constraint, text: str) -> bool:
    """Whether the constraint takes the text, token by token, and may end there."""
    state = make_state(constraint)
    for token in ids(text):
        if token not in legal(state):
            return False
        if state.push(token):
            return token == ids(text)[-1]
    return END in legal(state)


DATE = Constraint("regex", "[0-9]{4}-[0-9]{2}")
POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}


@pytest.mark.parametrize(
    ("kind", "text", "good", "bad"),
    [
        ("regex", "[0-9]{4}-[0-9]{2}", ["2024-07"], ["2024", "2024-7a", "x"]),
        ("regex", "^(ab|é)+$", ["ab", "éab"], ["", "a"]),
        ("choice", json.dumps(["yes", "no", 'a"b\\\n', "日本"]), ["yes", "no", 'a"b\\\n', "日本"], ["ye", "n", "日", "maybe"]),
        ("choice", json.dumps(["a", "ab"]), ["a", "ab"], ["b"]),
        ("json_object", "", ["{}", '{"a": [1, null, "é"]}', '{\n  "a": {}\n}'], ["[]", "1", "{", '{"a"}']),
        ("json_schema", json.dumps(POINT), ['{"x": 1}', '{"x":-20}'], ["{}", '{"y": 1}', '{"x": "1"}', '{"x": 1, "y": 2}']),
        ("json_schema", json.dumps({**POINT, "x-guidance": {"whitespace_flexible": False}}), ['{"x":1}'], ['{"x": 1}']),
        ("lark", 'start: "a" DIGIT+\nDIGIT: /[0-9]/', ["a1", "a120"], ["a", "1"]),
        ("ebnf", 'root ::= item ("," item)*\nitem ::= "x" | "y"', ["x", "x,y,x"], ["", "x,", "xy"]),
    ],
)
def test_every_kind(kind: str, text: str, good: list[str], bad: list[str]) -> None:
    constraint = Constraint(kind, text)
    assert {case: matches(constraint, case) for case in good} == dict.fromkeys(good, True)
    assert {case: matches(constraint, case) for case in bad} == dict.fromkeys(bad, False)


def test_white_space_ends_some_time() -> None:
    state = make_state(Constraint("json_object"))
    assert not state.push(ids("{")[0])
    for _ in range(40):
        assert ids("\n")[0] in legal(state)
        assert not state.push(ids("\n")[0])
    assert ids("\n")[0] not in legal(state)


def test_masks_of_a_tree_are_those_of_its_paths() -> None:
    """Random trees of legal and illegal tokens: every reachable node's mask equals that of a fresh state led there."""
    rng = random.Random(1)
    schema = {"type": "object", "properties": {"name": {"enum": ["ab", "abc"]}, "n": {"type": "array", "items": {"type": "integer"}}}}
    constraints = [
        DATE,
        Constraint("json_schema", json.dumps(schema)),
        Constraint("choice", '["aaaa", "aabb"]'),
        Constraint("regex", "a*(b|[0-9]{2,4})*"),
    ]
    compared = 0
    for _ in range(40):
        constraint = rng.choice(constraints)
        state = make_state(constraint)
        committed: list[int] = []
        for _ in range(rng.randrange(6)):
            committed.append(rng.choice(sorted(legal(state) - {END})))
            if state.push(committed[-1]):
                committed.clear()
                state = make_state(constraint)
        tree = random_tree(rng, constraint, committed)
        masks = state.masks(tree).words
        assert masks is not None
        assert np.array_equal(masks, state.masks(tree).words), "looking at a draft moves nothing on"
        for node in range(-1, len(tree)):
            fresh = make_state(constraint)
            path = [*committed, *tree.tokens[tree.path(node)].tolist()]
            if all(token in legal(fresh) and not fresh.push(token) for token in path) and END not in path:
                assert legal(fresh) == legal(state, tree, node)
                compared += 1
    assert compared > 100


def random_tree(rng: random.Random, constraint: Constraint, committed: Sequence[int]) -> DraftTree:
    tokens: list[int] = []
    parents: list[int] = []
    for node in range(rng.randrange(1, 12)):
        parent = rng.randrange(-1, node)
        state = make_state(constraint)
        path = DraftTree(np.array(tokens, np.int32), np.array(parents, np.int32)).path(parent) if parent >= 0 else []
        alive = all(not state.push(token) for token in [*committed, *(tokens[n] for n in path)])
        choices = sorted(legal(state)) if alive and rng.random() < 0.8 else list(range(SIZE))
        tokens.append(rng.choice(choices or [7]))
        parents.append(parent)
    return DraftTree(np.array(tokens, np.int32), np.array(parents, np.int32))


def test_an_output_is_complete_when_nothing_can_follow() -> None:
    state = make_state(DATE)
    assert [state.push(token) for token in ids("2024-07")] == [False] * (len(ids("2024-07")) - 1) + [True]
    state = make_state(Constraint("choice", '["a", "ab"]'))
    assert not state.push(ids("a")[0])
    assert legal(state) == {END, ids("b")[0]}
    assert state.push(ids("b")[0])


def test_end_tokens_are_legal_only_where_they_end_the_request() -> None:
    constraint = Constraint("regex", "a+")
    assert END not in legal(make_state(constraint))
    for params, ends, expected in [({}, (END,), True), ({}, (), False), ({"stop_token_ids": (END,)}, (), True)]:
        state = make_state(constraint, ends=ends, **params)  # type: ignore[arg-type]  # parameters of SamplingParams
        assert not state.push(ids("a")[0])
        assert (END in legal(state)) == expected


def test_a_draft_behind_an_end_token_or_a_complete_output_costs_nothing() -> None:
    state = make_state(Constraint("regex", "a|ab"))
    a, b = ids("a")[0], ids("b")[0]
    tree = DraftTree(np.array([a, b, END, a, b], np.int32), np.array([-1, 0, 0, 1, 2], np.int32))
    found = state.masks(tree)
    assert found.failures == ()
    assert legal(state, tree, 0) == {END, b}
    assert all(legal(state, tree, node) == set(range(SIZE)) for node in (1, 2, 3, 4))
    assert legal(state) == {a, *(token for token in range(SIZE) if TOKENIZER.decode([token]) == "ab")}


def test_a_grammar_that_no_token_continues_says_so() -> None:
    state = make_state(Constraint("regex", "()"), ends=())
    ((node, reason),) = state.masks(EMPTY).failures
    assert node == -1 and "no token" in reason


def test_padding_ids_are_never_legal() -> None:
    state = make_state(Constraint("regex", "(.|\n)*"), own=make_compiler(size=530))
    allowed = legal(state, size=530)
    assert len(allowed) > 300 and max(allowed) < SIZE and THINK not in allowed


def test_a_model_vocabulary_smaller_than_the_tokenizers() -> None:
    state = make_state(DATE, own=make_compiler(size=300))
    assert max(legal(state, size=300)) < 300


def test_a_model_without_an_end_token() -> None:
    own = make_compiler(tiny_tokenizer(None), ends=())
    state = make_state(Constraint("regex", "a+"), own=own, ends=())
    assert not state.push(ids("a")[0])
    assert texts(legal(state)) == {"a", "aa"}
    state = make_state(DATE, own=own, ends=())
    assert [state.push(token) for token in ids("2024-07")][-1]


def test_several_end_tokens() -> None:
    own = make_compiler(ends=(END, THINK))
    state = make_state(Constraint("regex", "a+"), own=own, ends=(END, THINK))
    assert not state.push(ids("a")[0])
    assert {END, THINK} <= legal(state)


# After a marker


@pytest.mark.parametrize("text", ["think</think>12", "</think></think>1", "<</<<//think</think>", "</thin</think>7"])
@pytest.mark.parametrize("cuts", range(12))
def test_a_marker_is_found_however_the_text_is_cut(text: str, cuts: int) -> None:
    marker = Marker(b"</think>", [])
    rng = random.Random(cuts)
    whole, matched, rest = text.encode(), 0, None
    places = sorted(rng.sample(range(1, len(whole)), k=min(cuts, len(whole) - 1)))
    pieces = [whole[a:b] for a, b in zip([0, *places], [*places, len(whole)], strict=True)]
    for index, piece in enumerate(pieces):
        matched, rest = marker.advance(matched, piece)
        if rest is not None:
            assert b"".join([rest, *pieces[index + 1 :]]) == whole.split(b"</think>", 1)[1]
            return
    raise AssertionError("not found")


def test_text_before_the_marker_is_free_and_text_behind_it_is_not() -> None:
    state = make_state(Constraint("regex", "[0-9]{2}", after="ab"))
    for token in [*ids("x"), THINK, *ids("a")]:
        assert state.masks(EMPTY).words is None
        assert not state.push(token)
    pairs = {token for token in range(258, SIZE) if TOKENIZER.decode([token]).startswith("b")}
    assert legal(state) == set(range(SIZE)) - pairs, "a b with a letter behind it would leave the pattern"
    assert not state.push(ids("b")[0])
    assert texts(legal(state)) == {*"0123456789", *(f"{n:02}" for n in range(100))}
    assert state.push(ids("07")[0])


def test_a_token_that_goes_on_behind_the_marker_must_go_on_legally() -> None:
    state = make_state(Constraint("regex", "b+|[0-9]", after="xa"))
    assert not state.push(ids("x")[0])
    bad = {token for token in range(258, SIZE) if TOKENIZER.decode([token]).startswith("a")} - {ids("ab")[0]}
    assert legal(state) == set(range(SIZE)) - bad
    assert not state.push(ids("ab")[0])
    assert texts(legal(state) - {END}) == {"b", "bb"}


@pytest.mark.parametrize("offset", range(6))
def test_a_marker_at_every_offset_of_a_draft(offset: int) -> None:
    text = [*ids("zz" * offset), *ids("</k>"), *ids("20"), *ids("9")]
    state = make_state(Constraint("regex", "[0-9]{3}", after="</k>"))
    chain = DraftTree.chain(text)
    for node in range(-1, len(text)):
        fresh = make_state(Constraint("regex", "[0-9]{3}", after="</k>"))
        done = [fresh.push(token) for token in text[: node + 1]]
        if not any(done):
            assert legal(state, chain, node) == legal(fresh)
    assert [state.push(token) for token in text] == [False] * (len(text) - 1) + [True]


# What is refused


@pytest.mark.parametrize(
    ("constraint", "match"),
    [
        (Constraint("regex", "(ab"), "unclosed group"),
        (Constraint("json_schema", "{"), "not valid JSON"),
        (Constraint("json_schema", "[1]"), "must be an object"),
        (Constraint("json_schema", '{"type": "dict"}'), "Invalid type: dict"),
        (Constraint("json_schema", '{"not": {}}'), "not"),
        (Constraint("choice", "[]"), "one or more"),
        (Constraint("choice", '["a", 1]'), "texts"),
        (Constraint("lark", "start: nope"), "nope"),
        (Constraint("ebnf", "root = x"), "::="),
        (Constraint("ebnf", "root ::= nope"), "nope"),
        (Constraint("regex", "a" * 70_000), "grammar_max_bytes allows 65536"),
    ],
)
def test_a_bad_constraint_is_the_requests_fault(constraint: Constraint, match: str) -> None:
    for _ in range(2):
        with pytest.raises(RequestError, match=match) as caught:
            COMPILER.compile(constraint)
        assert caught.value.param == "constraint"


def test_a_model_without_a_tokenizer_is_refused() -> None:
    with pytest.raises(RequestError, match="without a tokenizer"):
        make_compiler(None).compile(DATE)


def test_a_slow_grammar_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    real = compiler._compiled

    def slow(*args: Any) -> Grammar:
        go_on.wait(20)
        return real(*args)

    own = make_compiler(timeout_s=0.05)
    own.vocabulary()
    monkeypatch.setattr(compiler, "_compiled", slow)
    with pytest.raises(RequestError, match=r"grammar_timeout_s = 0\.05"):
        own.compile(DATE)
    go_on.set()
    deadline = time.monotonic() + 10
    while True:  # it was compiled in the end, and is there for the next request
        try:
            assert own.compile(DATE)[0] is not None
            return
        except RequestError:
            assert time.monotonic() < deadline


def test_grammars_are_compiled_once_and_the_oldest_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    own = make_compiler()
    first = own.compile(DATE)[0]
    assert own.compile(Constraint("regex", DATE.text, after="x"))[0] is first
    monkeypatch.setattr(compiler, "MAX_CACHED", 2)
    for text in ("a", "b"):
        own.compile(Constraint("regex", text))
    assert own.compile(DATE)[0] is not first


def test_threads_compile_the_same_grammar_once() -> None:
    own = make_compiler()
    found: list[Grammar] = []
    threads = [threading.Thread(target=lambda: found.append(own.compile(DATE)[0])) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and len({id(grammar) for grammar in found}) == 1


class BrokenMatcher:
    """A matcher whose masks fail after so many tokens beyond the first state."""

    def __init__(self, inner: Any, limit: int) -> None:
        self._inner, self._limit, self._depth, self._error = inner, limit, 0, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def try_consume_tokens(self, tokens: list[int]) -> int:
        count: int = self._inner.try_consume_tokens(tokens)
        self._depth += count
        return count

    def rollback(self, count: int) -> bool:
        self._depth -= count
        return bool(self._inner.rollback(count))

    def unsafe_compute_mask_ptr(self, pointer: int, size: int) -> None:
        self._error = self._error or self._depth > self._limit
        self._inner.unsafe_compute_mask_ptr(pointer, size)

    def is_error(self) -> bool:
        return self._error

    def get_error(self) -> str:
        return "too complex"


def test_a_parser_that_gives_up_in_a_draft_costs_the_rest_of_the_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    state = make_state(Constraint("regex", "a*"))
    monkeypatch.setattr(state, "_matcher", BrokenMatcher(state._matcher, 1))
    a, aa = ids("a")[0], ids("aa")[0]
    tree = DraftTree(np.array([a, a, aa, a], np.int32), np.array([-1, 0, -1, 2], np.int32))
    failed = {node for node, reason in state.masks(tree).failures if "too complex" in reason}
    assert failed in ({1, 3}, {1, 2, 3}, {0, 1, 3}), "the deep nodes, and those not looked at"
    assert state.masks(tree).failures == (), "the state itself is whole, with a new matcher"


def test_a_parser_that_gives_up_on_committed_text_fails_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    state = make_state(Constraint("regex", "[0-9]*"))
    monkeypatch.setattr(state, "_matcher", BrokenMatcher(state._matcher, 0))
    assert not state.push(ids("7")[0])
    ((node, reason),) = state.masks(EMPTY).failures
    assert node == -1 and "too complex" in reason
    assert not state.push(ids("7")[0]), "nor does anything raise later"
