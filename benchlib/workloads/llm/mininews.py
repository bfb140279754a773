"""Mininews: a seeded generator of short news with their summaries. It needs no download and no torch.

An article states one to four facts among sentences that matter to nobody; its summary states the facts alone, in a fixed
wording, in the order of the article. So a good summary takes finding the facts and copying their names, and its length
varies. The sentences of the splits "train" and "test" are phrased differently, facts and noise alike, and share no phrasing:
who learnt the training sentences by heart gains little. Names and things are those of both. All of it is invented.
"""

from dataclasses import dataclass
from random import Random

# The public prompt of MLPerf's Llama-3.1-8B (mlcommons/inference, language/llama3.1-8b/download_cnndm.py).
PROMPT = "Summarize the following news article in 128 tokens. Please output the summary only, without any other text.\n\nArticle:\n{input}\n\nSummary:"

PEOPLE = [
    "Abelson", "Barker", "Castell", "Dorran", "Ellery", "Farrow", "Gantry", "Hobart", "Iverson", "Jarrold", "Kestrel", "Lambert",
    "Marlowe", "Norwell", "Osgood", "Penrose", "Quimby", "Ransome", "Selwyn", "Thorne", "Underhill", "Vickers", "Wexford", "Yardley",
    "Zeller", "Ashdown", "Birkett", "Calder", "Denholm", "Everard", "Fenwick", "Grayson", "Harlan", "Ingram", "Jessop", "Kendrick",
    "Lorimer", "Merrick", "Nesbit", "Ormond", "Prescott", "Redfern", "Stroud", "Tolliver", "Vaughan", "Whitlock",
]  # fmt: skip
TOWNS = [
    "Arbury", "Brackwell", "Corfield", "Dunmere", "Eastham", "Fallow", "Glenrock", "Haverly", "Inchford", "Jutland", "Kelso", "Linden",
    "Mossley", "Northam", "Oakden", "Pelham", "Quorn", "Rushden", "Stanmere", "Tilbrook", "Upton", "Vale", "Westing", "Yoxford",
    "Zennor", "Ambleside", "Bexhill", "Cranmore",
]  # fmt: skip
DEEDS = [
    "opened", "closed", "bought", "sold", "painted", "repaired", "designed", "flooded", "visited", "saved", "defended", "burned",
    "moved", "rented",
]  # fmt: skip
THINGS = [
    "bridge", "school", "library", "station", "bakery", "museum", "harbour", "theatre", "hospital", "garden", "factory", "market",
    "tower", "stadium", "mill",
]  # fmt: skip
COUNTS = ["visitors", "homes", "jobs", "trees", "horses", "buses", "voters", "boats", "farms", "nurses"]
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
NUMBERS = (2, 99)

# P person, V deed, O thing, T town, D day, N number, K what is counted
SUMMARIES = {"deed": "P V the O in T.", "count": "T has N K."}
PHRASES: dict[str, dict[str, tuple[str, ...]]] = {
    "train": {
        "deed": (
            "P V the O in T on D.", "On D, P V the O in T.", "In T, P V the O.", "The O in T was V by P on D.", "Neighbours say P V the O in T.",
            "It was P who V the O of T.", "In T on D, P finally V the O.", "The O of T, old as it is, was V by P.", "P, aged N, V the O in T.",
            "P V the O, and T is happy about it.", "Nobody but P V the O in T.", "The O was V on D by P, who is from T.",
        ),
        "count": (
            "T has N K.", "There are N K in T.", "In T there were N K on D.", "N K were counted in T.", "T now counts N K.", "By D there were N K in all of T.",
            "With N K, T is content.", "No fewer than N K are in T.", "The mayor of T speaks of N K.",
        ),
        "noise": (
            "Rain is expected on D.", "More follows later.", "The story was first told on D.", "Nobody was hurt.", "The police gave no reason.",
            "Reporters waited outside for hours.", "It was a long week for all.", "Music played until late on D.", "The council meets again on D.",
            "Many asked what it means.", "This paper wrote about it before.", "Some were not pleased at all.",
        ),
    },
    "test": {
        "deed": (
            "Early on D, P at last V the O at T.", "Records show that the O near T was V by P.", "Friends of P confirm that P V the O over in T.",
            "As of D the O in T has been V, thanks to P.", "According to the clerk, P V the O that T was proud of.", "For T it was a surprise: P V the O.",
        ),
        "count": (
            "A survey of T finds N K.", "Officials at T list N K since D.", "The town of T is home to N K.", "After D, T could name N K.", "Figures from T show N K.",
        ),
        "noise": (
            "Clouds may return by D.", "A spokesman declined to comment.", "Details remain unclear.", "The inquiry ends on D.", "Crowds gathered in the square.",
            "Shops stayed shut that evening.", "Our correspondent will report on D.",
        ),
    },
}  # fmt: skip
FACTS = (1, 4)
WHOLE = 1_000  # articles where all are asked for


@dataclass(frozen=True)
class Article:
    """A text, and its reference summary with one sentence for each fact."""

    text: str
    summary: str

    @property
    def prompt(self) -> str:
        """The text in the prompt that models are asked with."""
        return PROMPT.format(input=self.text)


def _fill(phrase: str, values: dict[str, str]) -> str:
    """Put values in the place of the capital letters that stand alone."""
    parts = phrase.replace(".", " .").replace(",", " ,").replace(":", " :").split(" ")
    text = " ".join(values.get(part, part) for part in parts)
    return text.replace(" .", ".").replace(" ,", ",").replace(" :", ":")


def article(random: Random, split: str, facts: tuple[int, int] = FACTS) -> Article:
    """Return an article with as many facts as ``facts`` allows (least, most). No name or thing is in two facts of it."""
    phrases, count = PHRASES[split], random.randint(*facts)
    people, towns, things = (random.sample(words, count) for words in (PEOPLE, TOWNS, THINGS))
    deeds, counts = random.sample(DEEDS, count), random.sample(COUNTS, count)
    text, summary = [], []
    for place in range(count):
        kind = "deed" if random.random() < 0.65 else "count"
        values = {
            "P": people[place], "V": deeds[place], "O": things[place], "T": towns[place],
            "N": str(random.randint(*NUMBERS)), "K": counts[place], "D": random.choice(DAYS),
        }  # fmt: skip
        text.append(_fill(random.choice(phrases[kind]), values))
        summary.append(_fill(SUMMARIES[kind], values))
    # The first sentence tells nothing, so that copying the lead is not a summary.
    for number, noise in enumerate(random.sample(phrases["noise"], random.randint(1, 3))):
        place = random.randint(0, len(text)) if number else 0
        text.insert(place, _fill(noise, {"D": random.choice(DAYS)}))
    return Article(" ".join(text), " ".join(summary))


def generate(count: int, seed: int, split: str = "test") -> list[Article]:
    """Return ``count`` articles; the same arguments give the same ones, and a longer set starts with the shorter one."""
    random = Random(f"mininews {split} {seed}")
    return [article(random, split) for _ in range(count)]
