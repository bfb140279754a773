"""What several files of these tests start from."""

import pytest

from benchlib.judge.impossible.own import Numbers
from benchlib.judge.numbers import judged
from benchlib.results.run import Result
from benchlib.spec.checks import judge


@pytest.fixture
def judged_rows():
    """Judge rows by the own checks of a spec; the answers by name."""

    def answers(spec, rows):
        view, _ = judged(spec.tables, rows)
        tables = {name: rows for name, rows in rows.tables.items() if name != "run"}
        result = Result.of(rows.config, facts=dict(rows.run), tables=tables)
        claims = Numbers(result, config=rows.config)
        asked = [check for check in spec.checks if check.when(rows.config)]
        return {answer.name: answer for check in asked for answer in judge(check, view, claims)}

    return answers
