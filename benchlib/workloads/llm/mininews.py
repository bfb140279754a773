"""Mininews: a seeded generator of short news with their summaries. It needs no download and no torch.

An article states one to four facts among sentences that matter to nobody; its summary states the facts alone, in a fixed
wording, in the order of the article. So a good summary takes finding the facts and copying their names, and its length
varies. The sentences of the splits "train" and "test" are phrased differently, facts and noise alike, and share no phrasing:
who learnt the training sentences by heart gains little. Names and things are those of both. All of it is invented.
"""

import re
from dataclasses import dataclass
from random import Random

from benchlib.core.files import PACKAGE, read_json

# The public prompt of MLPerf's Llama-3.1-8B (mlcommons/inference, language/llama3.1-8b/download_cnndm.py).
PROMPT = "Summarize the following news article in 128 tokens. Please output the summary only, without any other text.\n\nArticle:\n{input}\n\nSummary:"
# Words by kind, and phrases by split and kind: P person, V deed, O thing, T town, D day, N number, K what is counted.
WORDS = read_json(PACKAGE / "assets" / "mininews.json")
SUMMARIES = {"deed": "P V the O in T.", "count": "T has N K."}
NUMBERS = (2, 99)
FACTS = (1, 4)
WHOLE = 1_000  # articles where all are asked for


@dataclass(frozen=True)
class Article:
    """A text, and its reference summary with one sentence for each fact."""

    text: str
    summary: str


def _fill(phrase: str, values: dict[str, str]) -> str:
    """Put values in the place of the capital letters that stand alone."""
    return re.sub(r"\b[A-Z]\b", lambda letter: values.get(letter[0], letter[0]), phrase)


def article(random: Random, split: str, facts: tuple[int, int] = FACTS) -> Article:
    """Return an article with as many facts as ``facts`` allows (least, most). No name or thing is in two facts of it."""
    phrases, count = WORDS["phrases"][split], random.randint(*facts)
    words = [random.sample(WORDS[kind], count) for kind in ("people", "towns", "things", "deeds", "counts")]
    text, summary = [], []
    for fact in zip(*words, strict=True):
        kind = "deed" if random.random() < 0.65 else "count"
        values = dict(zip("PTOVK", fact, strict=True))
        values |= {"N": str(random.randint(*NUMBERS)), "D": random.choice(WORDS["days"])}
        text.append(_fill(random.choice(phrases[kind]), values))
        summary.append(_fill(SUMMARIES[kind], values))
    # The first sentence tells nothing, so that copying the lead is not a summary.
    for number, noise in enumerate(random.sample(phrases["noise"], random.randint(1, 3))):
        place = random.randint(0, len(text)) if number else 0
        text.insert(place, _fill(noise, {"D": random.choice(WORDS["days"])}))
    return Article(" ".join(text), " ".join(summary))


def generate(count: int, seed: int, split: str = "test") -> list[Article]:
    """Return ``count`` articles; the same arguments give the same ones, and a longer set starts with the shorter one."""
    random = Random(f"mininews {split} {seed}")
    return [article(random, split) for _ in range(count)]
