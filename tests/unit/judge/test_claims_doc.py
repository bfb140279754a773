"""docs/claims.md is as its script writes it, and its example is refused for the reasons that it states."""

import re
from pathlib import Path

import make_claims_doc

from benchlib.judge.foreign.readers import read_claims
from benchlib.judge.impossible.rules import judge_claims

GUIDE_FILE = Path(__file__).parents[3] / "docs" / "claims.md"


def test_the_tables_of_the_page_are_up_to_date():
    assert make_claims_doc.page() == GUIDE_FILE.read_text(), "write it anew: python scripts/make_claims_doc.py"


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
