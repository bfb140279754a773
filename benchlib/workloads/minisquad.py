"""Minisquad: a seeded generator of SQuAD-like questions on invented people, towns, companies, ships and books. It needs no download.

A paragraph states several facts about several subjects of one kind: four people, say, with a birth year and a teacher each. So every
answer stands among others of its own type, and a question is answered by finding the sentence with its subject *and* its relation; to know
that "when" asks for a year is not enough (a guesser of that kind stays below F1 40, see tests/unit/workloads/test_minisquad.py). Sentences and
questions are phrased in several ways. Names are disjoint between the splits: a name belongs to "eval" or to "train" by its
checksum, whatever the seed, so evaluation asks about entities that training never saw.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from benchlib.workloads.squad_text import Example

FACTS = (6, 8)
SLOT = re.compile(r"\b([SX])\b")
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
    sentences: tuple[str, ...]
    questions: tuple[str, ...]


# the kinds of subject, each with its relations; several relations of a kind share an answer type on purpose
KINDS: dict[str, tuple[Relation, ...]] = {
    "person": (
        Relation("birth", "year",
                 ("S was born in X.", "The birth of S fell in X.", "In X, S was born.", "S came into the world in X."),
                 ("When was S born?", "In which year was S born?", "What is the birth year of S?")),
        Relation("death", "year",
                 ("S died in X.", "The death of S came in X.", "In X, S died.", "S passed away in X."),
                 ("When did S die?", "In which year did S die?", "What is the year of the death of S?")),
        Relation("home", "town",
                 ("S lived in X.", "The home of S stood in X.", "S made a home in X.", "X was the home of S."),
                 ("Where did S live?", "In which town was the home of S?", "Which town did S live in?")),
        Relation("teacher", "person",
                 ("S studied under X.", "The teacher of S was X.", "X taught S.", "X was the teacher of S."),
                 ("Who taught S?", "Under whom did S study?", "Who was the teacher of S?")),
        Relation("spouse", "person",
                 ("S married X.", "The spouse of S was X.", "X became the spouse of S.", "S chose X as spouse."),
                 ("Whom did S marry?", "Who was the spouse of S?", "Who became the spouse of S?")),
    ),
    "town": (
        Relation("river", "river",
                 ("S lies on the river X.", "The river X flows through S.", "Through S flows the X.", "The X is the river of S."),
                 ("Which river flows through S?", "On which river does S lie?", "What is the river of S?")),
        Relation("mayor", "person",
                 ("The mayor of S is X.", "X governs S as mayor.", "S elected X as mayor.", "X is the mayor of S."),
                 ("Who is the mayor of S?", "Who governs S?", "Whom did S elect as mayor?")),
        Relation("settled", "year",
                 ("S was settled in X.", "The first settlers reached S in X.", "In X, S was settled.", "Settlers built S in X."),
                 ("When was S settled?", "In which year was S settled?", "When did the first settlers reach S?")),
        Relation("bridge", "person",
                 ("The bridge of S was designed by X.", "X designed the bridge of S.", "The designer of the bridge in S was X."),
                 ("Who designed the bridge of S?", "Who was the designer of the bridge in S?", "By whom was the bridge of S designed?")),
    ),
    "company": (
        Relation("founder", "person",
                 ("S was founded by X.", "X founded S.", "The founder of S was X.", "X was the founder of S."),
                 ("Who founded S?", "By whom was S founded?", "Who was the founder of S?")),
        Relation("chair", "person",
                 ("S is chaired by X.", "X chairs S.", "The chair of S is X.", "X is the chair of S."),
                 ("Who chairs S?", "By whom is S chaired?", "Who is the chair of S?")),
        Relation("seat", "town",
                 ("S has its seat in X.", "The seat of S is X.", "S is based in X.", "The offices of S are in X."),
                 ("Where is S based?", "In which town is the seat of S?", "Where are the offices of S?")),
        Relation("opened", "year",
                 ("S opened in X.", "S began business in X.", "In X, S opened.", "The business of S began in X."),
                 ("When did S open?", "In which year did S begin business?", "When did the business of S begin?")),
    ),
    "ship": (
        Relation("captain", "person",
                 ("The captain of the S was X.", "X commanded the S.", "The S sailed under captain X.", "X was captain of the S."),
                 ("Who commanded the S?", "Who was the captain of the S?", "Under which captain did the S sail?")),
        Relation("port", "town",
                 ("The port of the S was X.", "The S was moored at X.", "X was the port of the S.", "The S had its port at X."),
                 ("Where was the S moored?", "What was the port of the S?", "In which town was the port of the S?")),
        Relation("launch", "year",
                 ("The S was launched in X.", "The launch of the S took place in X.", "In X, the S was launched."),
                 ("When was the S launched?", "In which year was the launch of the S?", "When did the launch of the S take place?")),
        Relation("wreck", "year",
                 ("The S sank in X.", "The S was wrecked in X.", "In X, the S sank.", "The wreck of the S dates from X."),
                 ("When did the S sink?", "In which year was the S wrecked?", "From which year dates the wreck of the S?")),
    ),
    "book": (
        Relation("author", "person",
                 ("The author of S is X.", "X wrote S.", "S was written by X.", "X is the author of S."),
                 ("Who wrote S?", "Who is the author of S?", "By whom was S written?")),
        Relation("translator", "person",
                 ("S was translated by X.", "X translated S.", "The translator of S is X.", "X is the translator of S."),
                 ("Who translated S?", "By whom was S translated?", "Who is the translator of S?")),
        Relation("published", "year",
                 ("S was published in X.", "S appeared in print in X.", "In X, S was published.", "X saw S in print."),
                 ("When was S published?", "In which year did S appear in print?", "What is the year S was published?")),
        Relation("setting", "town",
                 ("S is set in X.", "The story of S unfolds in X.", "X is the setting of S.", "S tells a story from X."),
                 ("Where is S set?", "In which town does the story of S unfold?", "What is the setting of S?")),
    ),
}  # fmt: skip


def split_of(word: str) -> str:
    """The split that owns a word of a name: "eval" for one in four, by checksum."""
    return "eval" if zlib.crc32(word.encode()) % 4 == 0 else "train"


def _word(random: Random, split: str, syllables: int) -> str:
    while True:
        word = "".join(random.choice(SYLLABLES) for _ in range(syllables)).capitalize()
        if split_of(word) == split:
            return word


class _Names:
    """Values of one paragraph, each given once. In some paragraphs all people share a last name, so that half a name is not enough."""

    def __init__(self, random: Random, split: str) -> None:
        self._random, self._split = random, split
        self._family = _word(random, split, 2) if random.random() < 0.15 else None
        self._given: set[str | None] = {self._family}

    def _make(self, kind: str) -> str:
        if kind == "year":
            return str(self._random.randint(*YEARS))
        if kind == "person":
            return f"{_word(self._random, self._split, 2)} {self._family or _word(self._random, self._split, 2)}"
        return _word(self._random, self._split, self._random.choice((2, 2, 3)))

    def new(self, kind: str) -> str:
        """A value none of whose words (but the shared last name of people) occurs in the paragraph yet."""
        shared = {self._family} if kind == "person" else set()
        while self._given & (words := set((name := self._make(kind)).split()) - shared):
            pass
        self._given |= words
        return name


@dataclass(frozen=True)
class Fact:
    """`subject` has `value` in `relation`; the value stands at character `start` of the paragraph."""

    relation: Relation
    subject: str
    value: str
    start: int


def _fill(template: str, subject: str, value: str) -> tuple[str, int]:
    """The sentence, and the character at which the value starts in it. S and X are words of their own in every template."""
    text, start = "", 0
    for part in SLOT.split(template):
        if part == "X":
            start = len(text)
        text += {"S": subject, "X": value}.get(part, part)
    return text, start


def _paragraph(random: Random, split: str, facts: int) -> tuple[str, str, list[Fact]]:
    """Kind, text and facts of one paragraph of `facts` sentences: two relations (one, if facts < 6) of several subjects."""
    kind = random.choice(tuple(KINDS))
    relations = random.sample(KINDS[kind], 2 if facts >= 6 else 1)
    names = _Names(random, split)
    subjects = [names.new(kind) for _ in range(-(-facts // len(relations)))]
    cells = [(subject, relation) for subject in subjects for relation in relations]
    random.shuffle(cells)
    stated: list[Fact] = []
    context = ""
    for subject, relation in cells[:facts]:
        value = names.new(relation.answer)
        sentence, start = _fill(random.choice(relation.sentences), subject, value)
        if random.random() < 0.15:
            opening = random.choice(OPENINGS)
            keep = sentence[0] if sentence.startswith((subject, value)) else sentence[0].lower()
            sentence, start = opening + keep + sentence[1:], start + len(opening)
        context += " " if context else ""
        stated.append(Fact(relation, subject, value, len(context) + start))
        context += sentence
    return kind, context, stated


def paragraphs(seed: int, split: str, facts: tuple[int, int] = FACTS) -> Iterator[tuple[str, str, list[Fact]]]:
    """Endless (kind, text, facts) of a split, the same for the same arguments."""
    random = Random(f"minisquad {split} {seed}")
    while True:
        yield _paragraph(random, split, random.randint(*facts))


def generate(n_questions: int, seed: int, split: str, facts: tuple[int, int] = FACTS) -> list[Example]:
    """`n_questions` examples of the split "train" or "eval", up to four a paragraph.

    The same arguments give the same examples on every machine, and a longer set starts with the shorter one. ``facts`` is
    the least and the most number of facts in a paragraph; below 4 a guess is right too often.
    """
    examples: list[Example] = []
    random = Random(f"minisquad questions {split} {seed}")
    for number, (kind, context, stated) in enumerate(paragraphs(seed, split, facts)):
        for place, fact in enumerate(random.sample(stated, min(QUESTIONS_PER_PARAGRAPH, len(stated)))):
            if len(examples) == n_questions:
                return examples
            question, _ = _fill(random.choice(fact.relation.questions), fact.subject, "")
            answers = ((fact.value, fact.start),)
            examples.append(Example(f"mini-{split}-{seed}-{number}-{place}", question, context, answers, kind))
    raise AssertionError("paragraphs are endless")
