"""The generated text that the embedded tiny BERT is pretrained on: invented creatures, invented relations, questions about them.

Nothing of it occurs in the benchmark's own generator (`benchlib.workloads.minisquad`): the relations are others (pets, meals, rivals, songs,
or words made of random letters), no name contains a syllable of the benchmark's names, numbers have three or five digits where
the benchmark's years have four. Only function words ("the", "of", "which") are shared. tests/unit/workloads/test_minisquad.py checks the names.

A sample is lower-case words; punctuation marks are words of their own.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from benchlib.workloads.minisquad import KINDS as SUBJECTS
from benchlib.workloads.minisquad import OPENINGS, SYLLABLES

MASK = "[MASK]"

# noun and verb of each relation whose value is a name
RELATIONS = (
    "pet keeps", "meal eats", "rival fights", "friend greets", "tool carries", "song sings", "color wears", "game plays",
    "enemy fears", "wish wants", "drink drinks", "plant grows", "stone collects", "cave guards", "cousin visits", "toy throws",
    "gift brings", "dance dances", "secret hides", "snack cooks", "idol admires", "prey hunts", "spell casts", "gem steals",
    "mask paints", "debt owes", "helper pays", "twin follows", "joke cracks", "star watches", "smell smells", "lamp lights",
)  # fmt: skip
# the same for values that are numbers
NUMBERS = (
    "price costs",
    "weight weighs",
    "score scores",
    "speed reaches",
    "code shows",
    "size measures",
    "power gives",
)
KINDS = ("dragon", "robot", "ghost", "elf", "giant", "beetle", "planet", "machine", "clown", "wolf", "cloud", "monster")
SENTENCES = (
    "S V X .", "the N of S is X .", "X is the N of S .", "S has X as its N .", "for its N S has X .", "S V X as its N .",
    "the N that S V is X .", "S , a K , V X .", "the K S V X .", "the N of the K S was X .", "in the past , S V X .",
    "X was the N of S .", "as all say , S V X .", "it is X that S V .", "S V X , as they say .", "with S , the N is X .",
    "X , the N of S , is known to all .", "today S V X .", "X is what S V .", "X is V by S .", "X was V by S .", "the one that S V is X .",
)  # fmt: skip
PAIRS = (
    "S V X and W Y .",
    "S , whose N is X , W Y .",
    "S V X , and its M is Y .",
    "the N of S is X , its M is Y .",
    "S V X but W Y .",
)
QUESTIONS = (
    "what is the N of S ?", "what does S V ?", "which N does S have ?", "S V what ?", "which N was it that S V ?",
    "what was the N of S ?", "who is the N of S ?", "what N is that of S ?", "S has which N ?", "of S , what is the N ?",
    "which is the N that S V ?", "name the N of S .", "what is known as the N of S ?", "who does S V ?", "where is the N of S ?",
    "when is it that S V ?", "in what is the N of S ?", "the N of S is what ?", "what is V by S ?", "by S , what was V ?", "where does S V ?",
)  # fmt: skip
REVERSED = (
    *("who has X as its N ?", "what V X ?", "whose N is X ?"),
    *("who V X ?", "X is the N of whom ?", "which one V X ?"),
)
LETTERS = "abcdefghijklmnopqrstuvwxyz"
# All words of the benchmark's phrasings but its slots S and X: by chance random letters could spell "live".
PHRASINGS = [
    text for kind in SUBJECTS.values() for relation in kind for text in (*relation.sentences, *relation.questions)
]
FOREIGN = {word.lower() for text in (*PHRASINGS, *OPENINGS) for word in re.findall("[A-Za-z]+", text)} - {"s", "x"}
CONSONANTS, VOWELS = "bcdfghjklmnpqrstvwxyz", "aeiou"


@dataclass(frozen=True)
class Sample:
    """One question on one paragraph; `start` and `end` (inclusive) count words of `context`."""

    question: list[str]
    context: list[str]
    start: int
    end: int


def invent(random: Random) -> str:
    """A word of 3 to 9 letters, no word and with no syllable of the benchmark: half of them random letters, half speakable."""
    while True:
        if random.random() < 0.5:
            word = "".join(random.choices(LETTERS, k=random.randint(3, 9)))
        else:
            parts = (random.choice(CONSONANTS) + random.choice(VOWELS) for _ in range(random.randint(2, 4)))
            word = "".join(parts) + random.choice(("", random.choice(CONSONANTS)))
        if word not in FOREIGN and not any(syllable in word for syllable in SYLLABLES):
            return word


def _number(random: Random) -> list[str]:
    return [str(random.randint(100, 999) if random.random() < 0.5 else random.randint(10_000, 99_999))]


def _namer(random: Random) -> Callable[[], list[str]]:
    """Names of one kind: of one or two words; in some paragraphs one of the two comes from a small pool and so repeats."""
    words = random.choice((1, 1, 2))
    pool = [invent(random) for _ in range(random.randint(1, 3))] if words == 2 and random.random() < 0.4 else []
    pooled = random.randrange(2)

    def name() -> list[str]:
        return [random.choice(pool) if pool and i == pooled else invent(random) for i in range(words)]

    return name


def _relation(random: Random) -> tuple[str, str, Callable[[], list[str]]]:
    """Noun, verb and maker of values. Half of the relations are invented words, so that matching and not a list is learned."""
    draw = random.random()
    if draw < 0.2:
        noun, verb = random.choice(NUMBERS).split()
        return noun, verb, lambda: _number(random)
    if draw < 0.6:
        noun, verb = random.choice(RELATIONS).split()
        return noun, verb, _namer(random)
    noun = invent(random)
    return noun, noun, _namer(random)


def _fill(template: str, slots: dict[str, list[str]]) -> tuple[list[str], dict[str, tuple[int, int]]]:
    """Words of a template with its slots filled, and where each slot lies: slot -> (first word, last word)."""
    words: list[str] = []
    spans: dict[str, tuple[int, int]] = {}
    for token in template.split():
        value = slots.get(token)
        if value is None:
            words.append(token)
        else:
            spans[token] = (len(words), len(words) + len(value) - 1)
            words.extend(value)
    return words, spans


def sample(random: Random, facts: int) -> Sample:
    """A paragraph of about `facts` facts on several creatures and relations, and one question whose answer is a span of it."""
    count = min(facts, random.choice((1, 2, 2, 3)))
    relations = [_relation(random) for _ in range(count)]
    name, kind = _namer(random), random.choice(KINDS)
    subjects = [name() for _ in range(-(-facts // count))]
    grid = [(s, r) for s in range(len(subjects)) for r in range(count)]
    random.shuffle(grid)
    grid = grid[:facts]
    values = {cell: relations[cell[1]][2]() for cell in grid}
    asked = random.choice(grid)
    backwards = random.random() < 0.15

    context: list[str] = []
    place = (0, 0)
    done: set[tuple[int, int]] = set()
    for cell in grid:
        if cell in done:
            continue
        s, r = cell
        slots = {"S": subjects[s], "K": [kind], "N": [relations[r][0]], "V": [relations[r][1]], "X": values[cell]}
        cells = {"X": cell}
        partner = next((c for c in grid if c[0] == s and c != cell and c not in done), None)
        template = random.choice(SENTENCES)
        if partner is not None and random.random() < 0.4:
            template = random.choice(PAIRS)
            slots |= {"M": [relations[partner[1]][0]], "W": [relations[partner[1]][1]], "Y": values[partner]}
            cells["Y"] = partner
        words, spans = _fill(template, slots)
        for slot, stated in cells.items():
            done.add(stated)
            if stated == asked:
                first, last = spans["S" if backwards else slot]
                place = (len(context) + first, len(context) + last)
        context.extend(words)

    s, r = asked
    slots = {"S": subjects[s], "K": [kind], "N": [relations[r][0]], "V": [relations[r][1]], "X": values[asked]}
    if random.random() < 0.25:  # a cloze question: another sentence on the same fact with the answer masked
        template = random.choice(SENTENCES)
        slots["S" if backwards else "X"] = [MASK]
    else:
        template = random.choice(REVERSED if backwards else QUESTIONS)
    return Sample(_fill(template, slots)[0], context, *place)


def words() -> list[str]:
    """All fixed words of the text, sorted: what the vocabulary holds whole."""
    text = " ".join((*RELATIONS, *NUMBERS, *KINDS, *SENTENCES, *PAIRS, *QUESTIONS, *REVERSED))
    return sorted({word for word in text.split() if word.isalpha() and word.islower()})
