import pytest

from specdec.drafter_spec import DrafterSpec, parse_drafter_spec
from specdec.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("off", ()),
        ("ngram", (DrafterSpec("ngram"),)),
        ("ngram(min=2,max=5)", (DrafterSpec("ngram", None, (("max", 5), ("min", 2))),)),
        ("model:/a/b-c.gguf", (DrafterSpec("model", "/a/b-c.gguf"),)),
        ("model:org/name(depth=4)", (DrafterSpec("model", "org/name", (("depth", 4),)),)),
        ("ngram + model:x", (DrafterSpec("ngram"), DrafterSpec("model", "x"))),
        ("a.b:C(x=0.5,y=true,z=word)", (DrafterSpec("a.b", "C", (("x", 0.5), ("y", True), ("z", "word"))),)),
    ],
)
def test_specs_parse(text: str, parts: tuple[DrafterSpec, ...]) -> None:
    assert parse_drafter_spec(text) == parts


BAD = ["", "+", "ngram+", "ngram(", "ngram(min)", "ngram(min=)", "ngram(min=1,min=2)", "off+ngram", "off(x=1)", "9x"]


@pytest.mark.parametrize("text", BAD)
def test_what_is_no_spec_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="drafter"):
        parse_drafter_spec(text)


def test_a_spec_prints_as_it_parses() -> None:
    for text in ("ngram(max=5,min=2)", "model:a/b(depth=4,flag=true)"):
        assert str(parse_drafter_spec(text)[0]) == text
