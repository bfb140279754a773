"""docs/architecture.md names files and functions; a reader who follows it must find them."""

import re
from xml.etree import ElementTree

import pytest

from benchlib.core.files import home

PAGE = (home() / "docs" / "architecture.md").read_text(encoding="utf-8")
STATIONS = re.findall(r"^\| \d+ \| `([^`]+)` \| (.+) \|$", PAGE, re.MULTILINE)


@pytest.mark.parametrize(("path", "text"), STATIONS, ids=[path for path, _ in STATIONS])
def test_a_station_has_its_file_and_its_functions(path, text):
    source = (home() / path).read_text(encoding="utf-8")
    for name in re.findall(r"`(\w+)\(\)`", text):
        assert re.search(rf"^ *def {name}\(", source, re.MULTILINE), f"{path} has no function {name}"
    for name in re.findall(r"`([A-Z]\w+)`", text):
        assert re.search(rf"^class {name}\b", source, re.MULTILINE), f"{path} has no class {name}"


def test_the_number_that_is_followed_is_there():
    assert re.search(r"^  train_questions: 4000$", (home() / "params/tiers/quick.yaml").read_text(), re.MULTILINE)


def test_every_path_on_the_page_exists():
    for path in re.findall(r"`((?:benchlib|docs|notebooks|params|tests)/[^`]*)`", PAGE):
        assert (home() / path).exists(), path


def test_the_picture_is_whole_and_asks_for_nothing():
    picture = (home() / "docs" / "architecture.svg").read_text(encoding="utf-8")
    assert ElementTree.fromstring(picture).tag.endswith("svg")
    assert re.findall(r"https?://[^\s\"]+", picture) == ["http://www.w3.org/2000/svg"]
