"""Minisquad: a seeded generator of SQuAD-like questions on invented people, towns, companies, ships and books. It needs no download.

A paragraph states several facts about several subjects of one kind: four people, say, with a birth year and a teacher each. So every
answer stands among others of its own type, and a question is answered by finding the sentence with its subject *and* its relation; to know
that "when" asks for a year is not enough (a guesser of that kind stays below F1 40, see tests/unit/workloads/test_minisquad.py). Sentences and
questions are phrased in several ways. Names are disjoint between the splits: a name belongs to "eval" or to "train" by its
checksum, whatever the seed, so evaluation asks about entities that training never saw.
"""

import itertools
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

from benchlib.core.files import read_yaml
from benchlib.workloads.squad_data import Example

FACTS = (6, 8)
SUBJECT = re.compile(r"\bS\b")
QUESTIONS_PER_PARAGRAPH = 4
SYLLABLES = (
    "bra", "cor", "dun", "fal", "gre", "hol", "jur", "kel", "lom", "mir", "nar", "osk", "pel", "quo", "rud", "sil",
    "tav", "ulm", "vor", "wex", "yar", "zan", "bel", "cas", "dro", "fen", "gol", "hes", "kor", "lin", "mav", "nol",
    "pru", "ren", "sto", "tul", "vik", "wod", "yel", "zor",
)  # fmt: skip
YEARS = (1500, 1999)
OPENINGS = ("According to the records, ", "As the archive notes, ", "It is certain that ", "By most accounts, ")


@dataclass(frozen=True)
class Relation:
    """One thing stated about a subject: `answer` is the type of its value; S and X in the phrasings stand for subject and value."""

    name: str
    answer: str
    sentences: list[str]
    questions: list[str]


KINDS: dict[str, tuple[Relation, ...]] = {
    kind: tuple(Relation(name, **said) for name, said in relations.items())
    for kind, relations in read_yaml(Path(__file__).parents[1] / "assets/minisquad.yaml").items()
}


def split_of(word: str) -> str:
    """The split that owns a word of a name: "eval" for one in four, by checksum."""
    return "eval" if zlib.crc32(word.encode()) % 4 == 0 else "train"


def _word(random: Random, split: str, syllables: int) -> str:
    while True:
        word = "".join(random.choice(SYLLABLES) for _ in range(syllables)).capitalize()
        if split_of(word) == split:
            return word


def _names(random: Random, split: str) -> Callable[[str], str]:
    """What gives the values of one paragraph by type: no word of one (but people's last name) was given before.

    In some paragraphs all people share a last name, so that half a name is not enough.
    """
    family = _word(random, split, 2) if random.random() < 0.15 else ""
    used = {family}

    def new(kind: str) -> str:
        while True:
            if kind == "year":
                name = str(random.randint(*YEARS))
            elif kind == "person":
                name = f"{_word(random, split, 2)} {family or _word(random, split, 2)}"
            else:
                name = _word(random, split, random.choice((2, 2, 3)))
            words = set(name.split()) - ({family} if kind == "person" else set())
            if not used & words:
                used.update(words)
                return name

    return new


@dataclass(frozen=True)
class Fact:
    """`subject` has `value` in `relation`; the value stands at character `start` of the paragraph."""

    relation: Relation
    subject: str
    value: str
    start: int


def _fill(template: str, subject: str, value: str) -> tuple[str, int]:
    """The sentence, and the character at which the value starts in it. S and X are words of their own in every template."""
    before, slot, after = SUBJECT.sub(subject, template).partition("X")
    return before + (value if slot else "") + after, len(before)


def paragraphs(seed: int, split: str, facts: tuple[int, int] = FACTS) -> Iterator[tuple[str, str, list[Fact]]]:
    """Endless (kind, text, facts) of a split, the same for the same arguments.

    A paragraph has a sentence a fact, of two relations (one, if there are fewer than 6) of several subjects.
    """
    random = Random(f"minisquad {split} {seed}")
    while True:
        count, kind = random.randint(*facts), random.choice(tuple(KINDS))
        relations = random.sample(KINDS[kind], 2 if count >= 6 else 1)
        name_of = _names(random, split)
        subjects = [name_of(kind) for _ in range(-(-count // len(relations)))]
        cells = [(subject, relation) for subject in subjects for relation in relations]
        random.shuffle(cells)
        stated, context = list[Fact](), ""
        for subject, relation in cells[:count]:
            value = name_of(relation.answer)
            sentence, start = _fill(random.choice(relation.sentences), subject, value)
            if random.random() < 0.15:
                opening = random.choice(OPENINGS)
                keep = sentence[0] if sentence.startswith((subject, value)) else sentence[0].lower()
                sentence, start = opening + keep + sentence[1:], start + len(opening)
            context += " " if context else ""
            stated.append(Fact(relation, subject, value, len(context) + start))
            context += sentence
        yield kind, context, stated


def generate(n_questions: int, seed: int, split: str, facts: tuple[int, int] = FACTS) -> list[Example]:
    """`n_questions` examples of the split "train" or "eval", up to four a paragraph.

    The same arguments give the same examples on every machine, and a longer set starts with the shorter one. ``facts`` is
    the least and the most number of facts in a paragraph; below 4 a guess is right too often.
    """
    random = Random(f"minisquad questions {split} {seed}")

    def endless() -> Iterator[Example]:
        for number, (kind, context, stated) in enumerate(paragraphs(seed, split, facts)):
            for place, fact in enumerate(random.sample(stated, min(QUESTIONS_PER_PARAGRAPH, len(stated)))):
                question, _ = _fill(random.choice(fact.relation.questions), fact.subject, "")
                name, answers = f"mini-{split}-{seed}-{number}-{place}", ((fact.value, fact.start),)
                yield Example(name, question, context, answers, kind)

    return list(itertools.islice(endless(), n_questions))
