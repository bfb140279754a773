"""A trend as a line of text height: inline SVG with the band, the changes and the runs outside, and words for all of it."""

from markupsafe import Markup

from benchlib.metrics import quantity
from benchlib.trends import Change, Trend, spanned

TREND = 40  # runs in a sparkline, the newest
_HIGH, _WIDE = 24.0, 100.0
SIGNS = {"worse": "▼", "better": "▲", "other": "◆"}


def sparkline(trend: Trend) -> Markup:
    """Return the last runs of a trend as a line; nothing for fewer than two values."""
    first = max(0, len(trend.values) - TREND)
    values = trend.values[first:]
    if len(values) < 2:
        return Markup("")
    bands = [level for level in trend.levels.levels if level.end > first]
    low = min([*values, *(level.low for level in bands)])
    high = max([*values, *(level.high for level in bands)])

    def x(index: float) -> float:
        return _WIDE * (index - first) / (len(values) - 1)

    def y(value: float) -> float:
        return 2 + (_HIGH - 4) * (1 - ((value - low) / (high - low) if high > low else 0.5))

    parts = [Markup('<svg class="spark" viewBox="-3 0 106 24" role="img" aria-label="{}">').format(said(trend))]
    for level in bands:
        left, right = x(max(level.start - 0.5, first)), x(min(level.end - 0.5, len(trend.values) - 1))
        box = (left, y(level.high), right - left, max(0.6, y(level.low) - y(level.high)))
        parts.append(Markup('<rect class="band" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"/>').format(*box))
    line = " ".join(f"{x(first + place):.1f},{y(value):.1f}" for place, value in enumerate(values))
    parts.append(Markup('<polyline points="{}"/>').format(line))
    for change in trend.changes:
        if change.index >= first:
            at = x(change.index - 0.5) if change.index > first else x(first)
            parts.append(
                Markup('<path class="{}" d="M{:.1f} 0V24"/>').format(f"change {change.word}", at) + _sign(change, at)
            )
    for index in trend.outside:
        if index >= first:
            a, b = x(index), y(trend.values[index])
            parts.append(Markup('<path class="off" d="M{:.1f} {:.1f}l4 4m0 -4l-4 4"/>').format(a - 2, b - 2))
    parts.append(Markup('<circle cx="{:.1f}" cy="{:.1f}" r="2.2"/></svg>').format(_WIDE, y(values[-1])))
    return Markup("").join(parts)


def _sign(change: Change, at: float) -> Markup:
    """Return the shape of a change: a triangle that points down for worse and up for better, a diamond otherwise."""
    shapes = {
        "worse": "M{:.1f} 24l-3.4 -6h6.8z",
        "better": "M{:.1f} 0l-3.4 6h6.8z",
        "other": "M{:.1f} 9l3 3l-3 3l-3 -3z",
    }
    return Markup('<path class="{}" d="{}"/>').format(f"sign {change.word}", shapes[change.word].format(at))


def told(change: Change, unit: str = "") -> str:
    """Say a change in a line: its sign and word, the levels, the ratio, the day and what else changed there."""
    size = f"× {change.ratio:.3g}" if change.ratio is not None else "changed"
    levels = spanned(change.before, change.after, unit, " → ")
    factors = "; ".join(f"{name} {old} → {new}" for name, old, new in change.factors[:3])
    more = f" and {len(change.factors) - 3} more" if len(change.factors) > 3 else ""
    why = f"with {factors}{more}" if factors else "nothing recorded changed with it"
    word = {"other": "changed"}.get(change.word, change.word)
    return f"{SIGNS[change.word]} {word}, {size} on {change.run.moment:%Y-%m-%d}: {levels}; {why}"


def said(trend: Trend) -> str:
    """Say in words what the line shows."""
    first = max(0, len(trend.values) - TREND)
    values = trend.values[first:]
    level = trend.levels.levels[-1]
    ends = f"from {quantity(values[0])} to {quantity(values[-1])}, lowest {quantity(min(values))}, highest {quantity(max(values))}"
    words = [f"{trend.label} of the last {len(values)} runs: {ends}"]
    if level.low < level.high:
        words.append(f"band {spanned(level.low, level.high, trend.unit)}")
    words += [told(change, trend.unit) for change in trend.changes if change.index >= first]
    off = sum(index >= first for index in trend.outside)
    words += [f"{off} run{'s' * (off > 1)} outside the band"] if off else []
    return "; ".join(words)
