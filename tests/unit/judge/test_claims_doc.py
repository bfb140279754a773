"""docs/claims.md against the models that read claim files, and its example against the rules."""

import re
import types
import typing
from pathlib import Path

import pytest

from benchlib.core.definitions import BUS_FACTORS
from benchlib.core.errors import UserError
from benchlib.judge.foreign.kit import GUIDE, nearest, parts
from benchlib.judge.foreign.readers import read_claims
from benchlib.judge.impossible.claim import Claim, ClaimFile, Collective
from benchlib.judge.impossible.rules import RULES, judge_claims

GUIDE_FILE = Path(__file__).parents[3] / "docs" / "claims.md"
WORDS = {int: "whole number", float: "number", str: "text", bool: "true or false", type(None): ""}


def kind(annotation):
    """Say in words what a field takes."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return kind(inner[0])
    if origin is typing.Literal:
        return ", ".join(repr(value).replace("'", '"') for value in inner)
    if origin in (typing.Union, types.UnionType):
        return next(word for word in map(kind, inner) if word)
    if origin is list:
        return f"list of {kind(inner[0])}s"
    if origin is dict:
        return f"{kind(inner[1])}s by name".replace("texts", "text")
    return WORDS.get(annotation, "object")


def table(model):
    """Return the rows of a model's fields, from its own annotations and descriptions."""
    rows = [
        f"| `{name}` | {kind(field.annotation)} | {field.description}{' (needed)' if field.is_required() else ''} |"
        for name, field in model.model_fields.items()
    ]
    return "\n".join(["| field | takes | what it is |", "|---|---|---|", *rows])


def test_every_field_says_what_it_is():
    for model in (ClaimFile, Claim, *parts().values()):
        assert [name for name, field in model.model_fields.items() if not field.description] == [], model


@pytest.mark.parametrize("name", ["file", "claim", *parts()])
def test_the_tables_are_those_of_the_models(name):
    model = {"file": ClaimFile, "claim": Claim}.get(name) or parts()[name]
    assert table(model) in GUIDE_FILE.read_text(), f"the section on {name} should hold:\n{table(model)}"


def test_the_rules_are_those_of_the_table():
    rows = [f"| {rule.name} | {rule.catches} |" for rule in RULES.values()]
    assert "\n".join(["| rule | refuses |", "|---|---|", *rows]) in GUIDE_FILE.read_text()


def test_the_operations_that_are_told_are_those_that_have_a_factor():
    told = Collective.model_fields["operation"].description
    assert set(re.split(r", | or ", told)) == set(BUS_FACTORS)


def test_the_example_is_read_and_refused_for_the_reasons_that_are_told(tmp_path):
    text = GUIDE_FILE.read_text()
    example = re.search(r"```json\n(.*?)```", text, re.DOTALL)[1]
    path = tmp_path / "claim.json"
    path.write_text(example)
    name, claims = read_claims(path)
    judged = {judgement.rule.name: judgement for judgement in judge_claims(claims)}
    assert name == "claim"
    assert {rule for rule, judgement in judged.items() if judgement.failures} == {"rate from counts", "scaling"}
    for rule in ("rate from counts", "scaling"):
        assert f"`{rule}`" in text


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"samples_per_sec": 3}', r'begins with "claim_version": 1; the nearest is samples_per_s of speed; ' + GUIDE),
        ('{"some": "json"}', f'"claim_version": 1; {GUIDE}'),
        ('{"claim_version": 1, "claims": [{"speeds": {}}]}', f"the nearest is speed of claims.*{GUIDE}"),
        (
            '{"claim_version": 1, "claims": [{"speed": {"wall_time": 3}}]}',
            f"claims.0.speed.wall_time: no such.*{GUIDE}",
        ),
    ],
)
def test_json_that_is_no_claim_file_is_told_how_to_become_one(tmp_path, content, says):
    path = tmp_path / "some.json"
    path.write_text(content)
    with pytest.raises(UserError, match=says):
        read_claims(path)


def test_a_name_that_is_like_none_has_no_nearest():
    assert nearest("zebra") == ""
