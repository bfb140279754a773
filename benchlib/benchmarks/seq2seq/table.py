"""Tables as people paste them: a row for each machine, in CSV, TSV or Markdown; what each column holds, by its heading.

A column (``num_gpu``, ``nodes``) says how many devices a row is of, else a count before the row's name (``8x H200``). A heading
says what its column holds, and heading or cell in which unit. If no heading names a rate but the text around the table does, every
column of numbers is one that no heading explains, as in tables with a column per model; a table without a rate has none.
"""

import csv
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchlib.core.errors import UserError

COUNT = re.compile(r"(?<![\w.])(\d{1,5})\s?[x×]\s?(?=[A-Za-z])", re.I)
PERCENTILE = re.compile(r"\bp ?(\d\d(?:\.\d+)?)\b")
POINTS = {"mean": "mean_s", "avg": "mean_s", "average": "mean_s", "min": "min_s", "max": "max_s"}
BELOW = re.compile(r"[-−](?!1$)\d[\d.,]*|[-+]?inf(inity)?", re.I)  # -1 marks what was not measured
NUMBER = re.compile(r"~?((?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?)\s*(.*)")
EMPTY = {"", "-", "–", "—", "n/a", "none"}
ONE = r"(\(?1(\.0+)? ?[x×]?\)?)?"
BASELINE = re.compile(rf"{ONE} ?\(?(base(line)?|ref(erence)?)\)? ?{ONE}", re.I)
UNITS = {3600.0: "h hr hrs hour hours", 60.0: "min mins minute minutes", 1.0: "s sec secs second seconds", 1e-3: "ms"}
SECONDS = {name: seconds for seconds, names in UNITS.items() for name in names.split()}
TIMES = "|".join(SECONDS)
ITEMS = r"(sample|quer(y|ie)|req(uest)?|article|document|prompt|seq(uence)?|image|img|item|tok(en)?)s?"
PER_SECOND = r"(/|per) ?s(ec(ond)?)?"
# What a column with this heading holds, the first that fits, and the units that may stand behind its numbers.
RATIO = r"(x|×|times)( faster| speed-?up)?"
PRICES = r"price|cost|[$€£]|watt|power"
OTHERS = r"memory|batch|host|seed|\bsteps?\b(?! ?(/|per))|\bparam|epoch|\blen(gth)?\b|loss|accura|\bf1\b|score|rouge"
TIME = rf"((full |whole )?(data ?set )?(time|duration)( ({TIMES}))?|hours|minutes|seconds)"
SCORE = r"f1|em|exact match|(top ?-?[15] )?accuracy|rouge ?-?(1|2|l|lsum)|bleu|map"
PEAKS = r"peak|theoretical|sparse|fp4|\bint"
CHANGE = r"change|delta|diff|Δ|\bvs\b|saving|saved|reduc|improve|gain|loss|drop"
KINDS = {
    "score": (rf"^((dev|test|eval|val|validation) )?({SCORE})( score)?( %)?$", "%"),
    "flops": (
        rf"^(?!.*({PEAKS})).*\b[gtp]flop(s|/s|ps)?\b.*(/|per )(gpu|device|chip|accelerator)\b",
        r"[gtp]flop(s|/s|ps)?",
    ),
    "batch": (r"^global batch( size)?( samples)?$", "samples?"),
    "step": (rf"^(step|iter(ation)?) ?time( ({TIMES}))?$|^({TIMES}) ?/ ?(step|it|iter|iteration)$", TIMES),
    "at_once": (r"^(max )?concurrency$|^concurrent (requests|users|clients)$", ""),
    "busbw": (r"^bus ?(bw|bandwidth)( gb/s)?$", "gb/s"),
    "mfu": (r"^(mfu|model flops? utili[sz]ation)\b", "%"),
    "length": (r"^((seq(uence)?|sample) ?)?len(gth)?( tokens)?$|^tokens ?(/|per) ?(sample|seq(uence)?)$", "tok(en)?s?"),
    "unread": (rf"{PRICES}|{OTHERS}", ""),
    "latency": (r"latency|ttft|tpot|\bitl\b|\bp ?\d\d\b", TIMES),
    "rate": (rf"\b{ITEMS} ?{PER_SECOND}\b|throughput|\bqps\b", rf"({ITEMS} ?)?{PER_SECOND}|qps"),
    "ranks": (r"^(num |n )?(gpus?|nodes|devices|ranks|workers|servers|machines)$", ""),
    "samples_counted": (r"^samples( counted)?$", "samples"),
    "wall_s": (rf"^(total |wall |run |projected )?{TIME}$", TIMES),
    "speed-up": (r"^speed ?-?ups?( (x|factor|(vs|over) (the )?(baseline|single|one|1)\b.*))?$|^scaling$", RATIO),
    "improvement": (r"^(relative )?(improvement|gain)s?( x| factor)?$", RATIO),
    "efficiency": (r"^((weak |strong )?scaling |parallel )?efficiency( %)?$", "%"),
}
OPEN = ("unread", "score", "flops")  # an improvement of these may be a rise or a fall
# What makes the work of two rows another one.
CONDITIONS = (
    r"batch|\blen(gth)?\b|param|precision|dtype|bits|^model|engine|framework|backend|mode|setting|strategy|recipe|optimi[sz]er|"
    r"attention|data ?set|resolution|^(gpu|device|node|machine)( type| model)?$|hardware|accelerator"
)
MEASURED = ("rate", "busbw", "mfu", "wall_s", "step", "latency", "flops", "efficiency", "samples_counted")
PER_DEVICE = re.compile(r"(/|per )(gpu|device|node|chip|accelerator|rank|worker)\b")


class Column(NamedTuple):
    """What stands below a heading: a number a row in the unit of its scale, 0 if there is none: of a benchmark that was not run."""

    head: str
    kind: str
    numbers: list[float]
    scales: list[float]
    words: str  # of the heading, and the unit of the cells
    whole: bool  # every cell was read, or is empty
    of_tokens: bool
    per_device: bool
    impossible: dict[int, float | None]  # by row: below zero, or None if it is not finite
    cells: list[str]

    @property
    def point(self) -> str:
        """Return which percentile ("99") or end ("max_s") of a latency it is, '' if the heading does not say."""
        found = PERCENTILE.search(self.words.replace("median", "p50"))
        return found[1] if found else next((POINTS[word] for word in self.words.split() if word in POINTS), "")

    @property
    def of(self) -> str:
        """Return the heading without that."""
        words = PERCENTILE.sub("", self.words.replace("median", "p50")).split()
        return " ".join(word for word in words if word not in POINTS)


class Row(NamedTuple):
    name: str
    device: str  # the name without the count
    ranks: int
    place: int


class Table(NamedTuple):
    rows: Sequence[Row]
    columns: Sequence[Column]

    def of(self, kind: str, row: Row) -> list[tuple[Column, float]]:
        """Return the columns of a kind with the number that a row has of each, none where it has no number."""
        columns = [column for column in self.columns if column.kind == kind and column.numbers[row.place] > 0]
        return [(column, column.scales[row.place] * column.numbers[row.place]) for column in columns]

    def same_work(self, row: Row, other: Row) -> bool:
        """Return whether no column says that two rows had other work; a batch may grow with the devices."""
        for column in self.columns:
            mine, its = column.cells[row.place].lower(), column.cells[other.place].lower()
            ours, theirs = column.numbers[row.place], column.numbers[other.place]
            grown = "batch" in column.words and ours * other.ranks == theirs * row.ranks > 0
            told = column.kind in ("unread", "length", "batch") and re.search(CONDITIONS, column.words)
            if told and mine != its and not grown:
                return False
        return True

    def baselines(self, row: Row) -> list[Row]:
        """Return the other rows that are marked as baseline, the nearest above first."""
        marked = {row for row in self.rows for _, ratio in self.of("speed-up", row) if ratio == 1} - {row}
        return sorted(marked, key=lambda other: (other.place > row.place, -other.place))


def table(path: Path, text: str) -> Table:
    """Return what a table holds; ``UserError`` for a row that does not fit the header."""
    header, *lines = _cells(text) or [[]]
    if len(header) < 2 or not lines:
        raise UserError(f"{path}: not a throughput table; expected a header and rows of machines")
    for number, cells in enumerate(lines, 2):
        if len(cells) != len(header):
            size = f"{len(cells)} columns where the header has {len(header)}"
            raise UserError(f"{path}, row {number}: {size}; the file may be cut, or holds a second table")
    words = [" ".join(re.sub(r"[()\[\],:_]", " ", head.lower()).split()) for head in header]
    kinds = [next((kind for kind, (form, _) in KINDS.items() if re.search(form, each)), "") for each in words]
    named = re.search(rf"\b{ITEMS} ?{PER_SECOND}\b|throughput", _around(text), re.I)
    other = "rate" if named and not {"rate", "mfu"} & set(kinds) else "unread"
    columns = [
        _column(head, each, kind or other, list(cells))
        for head, each, kind, cells in zip(header, words, kinds, zip(*lines, strict=True), strict=True)
    ]
    # Beside a price an improvement may be that of the rate for it.
    kind = "unread" if any(any(each.numbers) and re.search(PRICES, each.words) for each in columns[1:]) else "speed-up"
    columns = [each._replace(kind=kind) if each.kind == "improvement" else each for each in columns]
    counts = next((column for column in columns if column.kind == "ranks" and all(column.numbers)), None)
    rows = list[Row]()
    for place, (name, *_) in enumerate(lines):
        count, device = COUNT.search(name), " ".join(COUNT.sub("", name).split())
        ranks = int(counts.numbers[place]) if counts else int(count[1]) if count else 1
        # Where the rows are named by their number of devices, all are of one machine.
        rows.append(Row(name, "" if counts is columns[0] else device, max(1, ranks), place))
    # The first column names the rows.
    told = columns[columns[0].kind != "at_once" :]
    return Table(rows, [column for column in told if column is not counts])


def _column(head: str, words: str, kind: str, cells: list[str]) -> Column:
    numbers, units, whole, impossible = list[float](), list[str](), True, dict[int, float | None]()
    ratio = kind in ("speed-up", "improvement")
    for place, cell in enumerate(cells):
        bare = cell.partition("±")[0].strip() or "-"
        match = NUMBER.fullmatch(bare)
        unit = match[2].strip().lower() if match else ""
        good = match and re.fullmatch(f"({KINDS[kind][1]})?", unit) and (unit or kind != "improvement")
        # The first row is the baseline of the others if it has no ratio.
        marked = ratio and (BASELINE.fullmatch(cell) or (not place and cell.lower() in EMPTY))
        numbers.append(1.0 if marked else float(match[1].replace(",", "")) if match and good else 0.0)
        units.append(unit if good else "")
        below = BELOW.fullmatch(bare.split()[0]) if kind in MEASURED and not re.search(CHANGE, words) else None
        if below:
            number = float(below[0].replace("−", "-").replace(",", ""))
            impossible[place] = number if math.isfinite(number) else None
        whole &= bool(good or marked) or cell.lower() in EMPTY or place in impossible
    if len({"tok" in unit for unit in units if unit}) > 1:  # tokens in one row, samples in another
        numbers, whole = [0.0 for _ in cells], False
    scale = 1.0
    if kind in ("wall_s", "latency", "step"):
        scale = next((SECONDS[word] for word in words.split()[::-1] if word in SECONDS), 1.0)  # "TTFT min (ms)"
    elif kind == "flops":
        scale = {"g": 1e9, "t": 1e12, "p": 1e15}[re.search(r"([gtp])flop", words)[1]]  # type: ignore[index]
    elif kind in ("efficiency", "mfu"):
        # Few trainings use 2% of the peak, and no machine has an efficiency of 2%.
        typical = max(numbers) if kind == "mfu" else min(filter(None, numbers), default=0.0)
        scale = 0.01 if typical > 2 or any("%" in text for text in (head, *cells)) else 1.0
    words = " ".join([words, *dict.fromkeys(filter(None, units))])
    of_tokens = kind == "rate" and "tok" in words
    scales = [SECONDS.get(unit, scale) for unit in units]
    return Column(
        head, kind, numbers, scales, words, whole, of_tokens, bool(PER_DEVICE.search(words)), impossible, cells
    )


def _around(text: str) -> str:
    """Return the lines that are not of the table: comments of a CSV, text around a Markdown table."""
    lines = text.splitlines()
    markdown = any(line.lstrip().startswith("|") for line in lines)
    return "\n".join(
        line for line in lines if (not line.lstrip().startswith("|") if markdown else line.startswith("#"))
    )


def _cells(text: str) -> list[list[str]]:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if any(line.startswith("|") for line in lines):
        parts = [[cell.strip(" *`") for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
        return [cells for cells in parts if not all(re.fullmatch(r":?-+:?", cell) for cell in cells)]
    lines = [line for line in lines if not line.startswith("#")]
    delimiter = "\t" if lines and "\t" in lines[0] else ","
    return [[cell.strip() for cell in cells] for cells in csv.reader(lines, delimiter=delimiter)]
