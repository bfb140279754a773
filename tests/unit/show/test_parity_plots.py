"""Pictures and tables of parity: what is drawn is what was recorded, nothing lies on anything else, what is missing is said."""

import itertools
import math
import re
from types import SimpleNamespace

import make_collectives
import pandas as pd
import pytest
from make_parity import (
    GRADIENT_LIMITS,
    LARGEST,
    LAYER_LIMITS,
    LIMITS,
    SKIPPED,
    STEPS,
    facts,
    layer_names,
    quantities,
    records,
    tables,
)
from matplotlib.figure import Figure
from matplotlib.text import Text

from benchlib.benchmarks.parity import figures, matrix, pictures
from benchlib.benchmarks.parity import tables as parity_tables
from benchlib.config.schema import build, save_config
from benchlib.core.errors import UserError
from benchlib.results.run import Run, save_result
from benchlib.show.figures import LIGHT
from benchlib.show.report import html

DRAWN = figures.FIGURES
NEEDED = {
    "backend-matrix": "nothing was compared", "latency-by-member": "No member was timed", "difference-histograms": "No differences",
    "divergence-by-depth": "No layer", "gradient-differences": "No gradients", "loss-curves": "No training steps",
    "attention-kernels": "No attention kernels",
}  # fmt: skip
MANY = [*LARGEST, "one_more_member", "second_of_them", "a_third_one", "and_the_last_one"]
RAN = [name for name in LARGEST if name not in SKIPPED]
HOOKED = [name for name in RAN if name not in ("aotinductor", "openvino", "openvino_default")]


def words(axes):
    return [text.get_text() for text in axes.texts]


def row_of(axes, member):
    return [label.get_text() for label in axes.get_yticklabels()].index(member)


def drawn(axes, what):
    return [line for line in axes.lines if line.get_gid() == what]


def test_layers_are_drawn_in_forward_order_beside_their_tolerances():
    axes = figures.depth(records()).axes[0]
    lines = dict(zip(HOOKED, drawn(axes, "member"), strict=True))
    last = len(layer_names()) - 1
    expected = [LARGEST["bf16"] * (0.2 + 0.8 * index / last) for index in range(last + 1)]
    assert lines["bf16"].get_ydata() == pytest.approx(expected)
    assert list(lines["bf16"].get_xdata()) == list(range(last + 1))
    assert axes.get_yscale() == "log"
    assert {line.get_ydata()[0] for line in drawn(axes, "tolerance")} == {LAYER_LIMITS["fp32"], LAYER_LIMITS["bf16"]}
    assert {"tolerance\nbf16", "tolerance\nfp32, fp64"} <= set(words(axes))
    # What is equal to the last bit has its place on the axis, called 0 and below everything else.
    zero = axes.get_yticks()[[label.get_text() for label in axes.get_yticklabels()].index("0")]
    assert set(lines["eager"].get_ydata()) == {zero}
    assert zero < min(lines["sdpa_math"].get_ydata())


@pytest.mark.parametrize("layer", [0, 3])
def test_the_first_layer_beyond_tolerance_is_ringed_and_named(layer):
    run = records(tables(planted={"sdpa_flash": layer}))
    figure = figures.depth(run)
    (ring,) = drawn(figure.axes[0], "first beyond")
    place = layer_names().index(f"bert.encoder.layer.{layer}.intermediate")
    assert (list(ring.get_xdata()), list(ring.get_ydata())) == ([place], [0.1])
    assert f"sdpa_flash: layer {layer} intermediate" in words(figure.axes[0])
    assert figure.alt.startswith(f"sdpa_flash exceeds its tolerance at layer {layer} intermediate")


def test_histograms_stand_at_their_differences_with_the_tolerance_of_the_member():
    figure = figures.histograms(records())
    axes = figure.axes[0]
    row = row_of(axes, "bf16")
    bars = [
        bar
        for bar in axes.patches
        if bar.get_y() == pytest.approx(row + 0.4) or bar.get_y() + bar.get_height() == pytest.approx(row + 0.4)
    ]
    ends = sorted(bar.get_x() + bar.get_width() for bar in bars)
    assert ends[1:] == pytest.approx([LARGEST["bf16"] / 10 ** (step / 3) for step in range(5, -1, -1)])
    heights = sorted(abs(bar.get_height()) for bar in bars)
    assert heights[0] / heights[-1] == pytest.approx(40 / 300)
    marks = {line.get_ydata()[0]: line.get_xdata()[0] for line in drawn(axes, "tolerance")}
    assert marks[row] == LIMITS["bf16"]
    assert marks[row_of(axes, "openvino_default")] == LIMITS["fp32"]
    # Only the member beyond its tolerance is coloured so; it does not gate, and its sign says that.
    wrong = {round(bar.get_y() + bar.get_height() + 0.4 if bar.get_height() > 0 else bar.get_y() - 0.4) for bar in axes.patches
             if bar.get_facecolor() != axes.patches[0].get_facecolor()}  # fmt: skip
    assert wrong == {row_of(axes, "openvino_default")}
    assert {"≈ 0.004", "✓ 0.008", "✓ 0"} <= set(words(axes))
    assert "Logits of openvino_default differ by more than the tolerance" in figure.alt
    assert "eager at most 0, 100% are equal" in figure.alt


def test_the_matrix_says_each_outcome_by_colour_and_sign():
    figure = pictures.matrix(records(tables(crashed=["compile"])))
    axes = figure.axes[0]
    cells = dict(
        zip(
            [label.get_text() for label in axes.get_yticklabels()],
            zip(words(axes), axes.patches, strict=True),
            strict=True,
        )
    )
    assert {name: cells[name][0] for name in ("eager", "bf16", "compile", "onnxruntime", "openvino_default")} == {
        "eager": "✓ 0", "bf16": "✓ 0.008", "compile": "✗ ended by signal 11 (SIGSEGV)", "onnxruntime": "– skipped",
        "openvino_default": "≈ 0.004",
    }  # fmt: skip
    colours = {cell[0][0]: cell[1].get_facecolor() for cell in cells.values()}
    assert len(set(colours.values())) == 4
    assert figure.alt.startswith(
        "9 of 10 match the reference; compile fails; openvino_default differs (informative) (tiny model)"
    )


def drawn_of(monkeypatch, machines):
    """Draw several machines: the first with all members, one that was skipped as a whole, others with three."""
    one, found = matrix.around(records(tables(crashed=["compile"]))), []
    for number, (machine, backend) in enumerate(machines):
        frame = one.assign(
            machine=machine,
            backend=backend,
            age_days=float(number),
            own=not number,
            model="tiny" if number else "bert-base, random weights",
        )
        if backend == "tpu":
            frame = frame.head(1).assign(
                member="all", word="SKIPPED", reason="torch_xla is not installed", max_difference=math.nan
            )
        found.append(
            frame if not number or backend == "tpu" else frame[frame["member"].isin(["bf16", "native", "compile"])]
        )
    with monkeypatch.context() as patch:
        patch.setattr(matrix, "around", lambda run: pd.concat(found, ignore_index=True))
        return pictures.matrix(records(), LIGHT)


MACHINES = [("ci-runner-4.eu.example", "cpu"), ("gpu-h100-7", "cuda"), ("mi300-node", "rocm"), ("tpu-v5e-pod-0", "tpu"), ("mac-studio", "mps"),
            ("arc-box", "xpu"), ("gpu-a100-2", "cuda"), ("gpu-l4-1", "cuda"), ("cpu-9", "cpu"), ("cpu-10", "cpu")]  # fmt: skip


def test_machines_stand_side_by_side_with_backend_age_and_model(monkeypatch):
    axes = drawn_of(monkeypatch, MACHINES[:2]).axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == [
        "ci-runner-4.eu.example\ncpu\nbert-base, random weights", "gpu-h100-7\ncuda, 1 day old\ntiny",
    ]  # fmt: skip
    figure = drawn_of(monkeypatch, MACHINES)
    heads = [label.get_text() for label in figure.axes[0].get_xticklabels()]
    assert heads[3] == "tpu-v5e-pod-0, tpu, 3 d *"
    assert figure.axes[0].get_yticklabels()[0].get_text() == "whole run"
    assert "whole run on tpu-v5e-pod-0 (tpu): SKIPPED, skipped" in figure.alt
    assert figure.get_suptitle().endswith("(tiny model)")  # of this run, which the title is about


def test_nothing_compared_is_no_agreement():
    found = tables(["onnxruntime"])
    figure = pictures.matrix(records(found))
    assert figure.alt.startswith("Nothing was compared")
    crashed = parity_tables.beyond(records(tables(["compile"], crashed=["compile"]))).loc["compile"]
    assert (crashed["quantity"], crashed["reason"]) == ("all", "ended by signal 11 (SIGSEGV)")
    beyond = parity_tables.beyond(records(found)).loc["onnxruntime"]
    assert (beyond["quantity"], plain(beyond["status"]), beyond["reason"]) == (
        "all",
        "– SKIPPED",
        SKIPPED["onnxruntime"],
    )


def test_quantities_that_are_not_numbers_are_said():
    found = tables(["sdpa_math", "eager"], crashed=["sdpa_math"])
    found["quantities"] = quantities(["sdpa_math", "eager"])
    for row in found["quantities"]:
        if row["member"] == "sdpa_math" and row["quantity"] in ("finite", "loss"):
            row |= {"value": None, "status": "FAIL", "reason": "3 numbers are NaN"}
        if row["quantity"] == "f1 difference":
            row |= {"value": None, "limit": None, "status": "SKIPPED", "reason": "no dev set"}
    beyond = parity_tables.beyond(records(found))
    assert [plain(value) for value in beyond.loc["sdpa_math", "value"]] == ["not finite", "not finite", "–"]
    assert beyond.loc["eager", "quantity"] == "f1 difference"
    table = parity_tables.by_quantity(records(found))
    assert (plain(table.loc["loss", "sdpa_math"]), table.loc["loss", "eager"], table.loc["f1 difference", "eager"]) == (
        "✗ not finite",
        "0",
        "–",
    )
    assert plain(parity_tables.outcomes_table(records(found)).loc["sdpa_math", "difference"]) == "1.2e-7"


def test_latency_stands_beside_the_reference():
    figure = pictures.latency(records(tables(["eager", "sdpa_math", "bf16"])))
    axes = figure.axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["eager", "sdpa_math", "bf16", "reference"]
    assert [line.get_xdata()[0] for line in drawn(axes, "median")] == [10, 11, 12, 20]
    assert [20, 20] in [list(line.get_xdata()) for line in axes.lines]
    assert words(axes) == ["10 ms, 0.50 ×", "11 ms, 0.55 ×", "12 ms, 0.60 ×", "20 ms"]
    table = parity_tables.latency(records())
    assert (table.loc["eager", "median / reference"], table.loc["eager", "queries/s"]) == ("0.50", f"{1e3 / 10.5:.3g}")
    found = tables(["eager"])
    found["latency"] = [row for row in found["latency"] if row["member"] != "reference"]
    assert words(pictures.latency(records(found)).axes[0]) == ["10 ms"]


def test_no_member_is_called_fastest_where_the_reference_is_faster():
    found = tables(["eager", "sdpa_flash"])
    found["latency"] = [
        row | ({"p50_ms": row["p50_ms"] / 3} if row["member"] == "reference" else {}) for row in found["latency"]
    ]
    alt = pictures.latency(records(found)).alt
    assert alt.startswith("No member is faster than the reference: eager takes 1.50 × its time")


def test_the_worst_gradient_of_each_member_is_named_beside_its_tolerance():
    figure = figures.gradients(records())
    axes = figure.axes[0]
    row = row_of(axes, "bf16")
    points = [line.get_xdata() for line in axes.lines if line.get_ydata()[0] == row]
    assert max(points[0]) == pytest.approx(10 * LARGEST["bf16"])
    assert list(points[1]) == [GRADIENT_LIMITS["bf16"]]
    assert words(axes).count("layer 0 attention.self.key.bias") == len(HOOKED) - 1
    assert "bf16 0.08 (bert.encoder.layer.0.attention.self.key.bias)" in figure.alt


def test_a_truth_whose_last_loss_is_no_number_is_drawn_without_its_name():
    found = tables()
    for row in found["curves"]:
        row["truth_loss"] = None if row["step"] else row["truth_loss"]
    figure = figures.losses(records(found))
    figure.draw_without_rendering()
    named = {text.get_text() for text in figure.findobj(Text)}
    assert "fp64 truth" not in named and "sdpa_math" in named


def test_losses_are_drawn_with_their_distance_from_the_reference():
    upper, lower = figures.losses(records()).axes
    assert upper.lines[0].get_ydata() == pytest.approx([5 * 0.9**step for step in range(STEPS)])
    bf16 = lower.lines[HOOKED.index("bf16")]
    assert bf16.get_ydata() == pytest.approx([LARGEST["bf16"] * (1 + step) / 10 for step in range(STEPS)])
    assert lower.lines[-1].get_ydata() == pytest.approx([1e-8 * (1 + step) for step in range(STEPS)], rel=1e-6)
    assert words(lower)[-1] == "bf16"


def test_attention_kernels_are_drawn_by_length_and_lacking_ones_named():
    found = tables(["eager"])
    for row in found["attention"]:
        if (row["kernel"], row["dtype"]) == ("flash", "fp32"):
            row |= {"status": "SKIPPED", "reason": "no kernel for fp32", "max_abs_truth": None, "max_abs_math": None}
    found["attention"] += [
        row | {"scale": 6.0, "max_abs_truth": 1.0} for row in found["attention"] if row["max_abs_truth"]
    ]
    figure = figures.kernels(records(found))
    left, right = figure.axes
    assert len(left.lines) == 5
    assert len(right.lines) == 2
    drawn = [list(line.get_ydata()) for line in left.lines]
    assert pytest.approx([1e-6 * (length / 128) ** 0.5 for length in (64, 128, 384, 1024)]) in drawn
    table = parity_tables.attention(records(found)).reset_index()
    peaked = table[(table["kernel"] == "math") & (table["q, k ×"] == "6")]
    assert set(peaked["from fp64"]) == {"1"}
    flash = table[table["kernel"] == "flash"].set_index("type")
    assert flash.loc["fp32", "fully masked row, or reason for not running"] == "no kernel for fp32"
    assert flash.loc["bf16", "cases"].iloc[0] == "8 of 8"


def overlapping(figure):
    """Return the pairs of texts that lie on each other and the texts that leave the figure, as drawn."""
    figure.canvas.draw()
    renderer, whole = figure.canvas.get_renderer(), figure.bbox
    found = []
    unseen = {label for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)
              for place, label in zip(axis.get_ticklocs(), axis.get_ticklabels(), strict=False)
              if not min(axis.get_view_interval()) <= place <= max(axis.get_view_interval())}  # fmt: skip
    for artist in set(figure.findobj(Text)) - unseen:
        if artist.get_visible() and artist.get_text().strip():
            # Slanted words fill less than the box around them, and the thin lines to words may cross.
            box = Text.get_window_extent(artist, renderer)
            if artist.get_rotation() % 90:
                box = box.padded(-box.height * 0.45)
            found.append((artist.get_text(), box))
    outside = [
        text
        for text, box in found
        if box.x0 < whole.x0 - 1 or box.x1 > whole.x1 + 1 or box.y0 < whole.y0 - 1 or box.y1 > whole.y1 + 1
    ]
    pairs = [(one, other) for (one, a), (other, b) in itertools.combinations(found, 2)
             if min(a.x1, b.x1) - max(a.x0, b.x0) > 1.5 and min(a.y1, b.y1) - max(a.y0, b.y0) > 2.5]  # fmt: skip
    return outside, pairs


@pytest.mark.parametrize("name", DRAWN)
@pytest.mark.parametrize("count", [1, 3, 16])
def test_no_words_lie_on_others_or_are_cut(name, count):
    few = ["sdpa_flash", "sdpa_math", "compile"][:count]  # alike, so that their names meet
    found = tables(few) if count < 4 else tables(MANY, crashed=["aotinductor"], planted={"sdpa_flash": 2})
    figure = DRAWN[name](records(found, facts("bert-base", "random")), LIGHT)
    assert overlapping(figure) == ([], [])


@pytest.mark.parametrize("machines", [2, 5, 8, 10])
def test_no_words_of_machines_lie_on_others_or_are_cut(machines, monkeypatch):
    assert overlapping(drawn_of(monkeypatch, MACHINES[:machines])) == ([], [])


@pytest.mark.parametrize(
    ("model", "init", "said"),
    [("tiny", "pretrained", "(tiny model)"), ("bert-base", "random", "(random weights)"), ("x", "pretrained", "")],
)
def test_titles_say_what_stands_in_for_real_weights(model, init, said):
    for name in set(DRAWN) - {"attention-kernels"}:  # whose inputs are random whatever the model is
        draw, found = DRAWN[name], tables(["sdpa_flash", "bf16"])
        title = draw(records(found, facts(model, init))).get_suptitle().replace("\n", " ")
        assert title.endswith(said) if said else "(tiny" not in title and "(random" not in title


@pytest.mark.parametrize("name", DRAWN)
def test_a_picture_without_its_table_says_what_is_missing(name):
    figure = DRAWN[name](records({}, {}), LIGHT)
    assert NEEDED[name].lower() in figure.alt.lower()
    figure.canvas.draw()
    assert figure.empty == (name != "backend-matrix")  # a run without members is itself a row of the matrix


class Damaged(SimpleNamespace):
    @property
    def result(self):
        raise UserError("result.json: cut")


@pytest.mark.parametrize("name", DRAWN)
@pytest.mark.parametrize("kind", ["nulls", "foreign", "damaged", "without truth"])
def test_every_run_of_parity_can_be_drawn(name, kind):
    found = tables(["sdpa_flash", "bf16"])
    if kind == "nulls":  # values that were not finite
        found = {key: [{column: None if isinstance(value, float) else value for column, value in row.items()} for row in rows]
                 for key, rows in found.items()}  # fmt: skip
    elif kind == "foreign":
        found = {key: [{"something": "else"}, {"member": "x", "kernel": "y", "limit": math.pi}] for key in found}
    elif kind == "without truth":
        for row in [*found["logits"], *found["curves"]]:
            row |= {column: None for column in row if "truth" in column}
        found["truth"] = []
    run = (
        Damaged(events=[], samples={}, path=None)
        if kind == "damaged"
        else records(found, {"model": 5, "reference": "x", "executors": []})
    )
    figure = DRAWN[name](run)
    assert figure.alt
    figure.canvas.draw()


@pytest.mark.parametrize("view", parity_tables.TABLES.values(), ids=parity_tables.TABLES)
def test_every_table_can_be_made_of_any_run(view):
    foreign = {key: [{"something": 1}, {"member": "x", "kernel": "y"}] for key in tables(["eager"])}
    for run in (records(), records({}, {}), records(foreign, {"model": 5})):
        frame = view(run)
        assert len(frame) or frame.columns.size


def test_no_picture_of_parity_is_drawn_of_another_benchmark(tmp_path):
    run = make_collectives.stored(tmp_path)
    run.result.tables["gradients"] = [
        {"collective": "gloo", "max_difference": 1e-7, "tolerance": 1e-6, "status": "PASS", "reason": ""}
    ]
    assert [name for name, draw in DRAWN.items() if not draw(run).empty] == []


def plain(words):
    return words.replace("\u00a0", " ").replace("\u2060", "")


def test_tables_say_limits_once_and_environments_side_by_side():
    run = records()
    limits = parity_tables.limits(run)
    assert [plain(text) for text in limits.loc["logits max difference", "limit"]] == ["≤ 1.0e-5", "≤ 0.03"]
    assert limits.loc["logits max difference", "members"].iloc[1] == "bf16"
    assert parity_tables.truth(run).loc["fp64", "verdict"] == "closer"
    sides = parity_tables.environments(run)
    assert tuple(sides.iloc[0]) == ("another Linux", "Linux", "differs")
    assert tuple(sides.loc["versions.torch"]) == ("2.13.0", "2.13.0", "")
    worst = parity_tables.worst(run)
    assert list(worst.index[:2]) == ["bf16", "bf16"] and len(worst) == 2 * len(RAN)
    assert list(worst.loc["openvino_default", "case"]) == ["len128-batch8", "edge-masked-row"]


def test_limits_are_known_before_the_run(tmp_path):
    save_config(build("parity", {"benchmark": "parity", "members": "sdpa_flash,bf16"}), tmp_path)
    frame = parity_tables.tolerances(Run(tmp_path))
    logits = frame.loc["logits max difference"].set_index("precision")
    assert logits["limit"].map(plain).to_dict() == {"fp32": "≤ 1.0e-5", "bf16": "≤ 0.03"}
    assert list(frame.index).count("repeats") == 1  # alike for both, with one reason


@pytest.mark.parametrize(("value", "text"), [(0.0, "0"), (2.96e-7, "3.0e-7"), (8e-3, "0.008"), (0.18, "0.18"), (12345.0, "1.2e4"),
                                             (math.nan, "not finite"), (math.inf, "not finite")])  # fmt: skip
def test_differences_are_written_with_two_digits(value, text):
    assert parity_tables.difference(value) == text


def test_names_of_layers_and_parameters_are_shortened_to_what_tells_them_apart():
    assert parity_tables.short("bert.encoder.layer.11.attention.self.key.bias") == "layer 11 attention.self.key.bias"
    assert parity_tables.short("model.layers.3") == "layer 3"
    assert parity_tables.short("bert.embeddings") == "embeddings"
    assert parity_tables.short("qa_outputs.weight") == "qa_outputs.weight"
    assert parity_tables.short("") == ""


def test_the_report_of_a_run_shows_views_and_pictures_and_stays_small(tmp_path):
    folder = tmp_path / "smoke-20261122" / "parity-cpu-101500-abcdef"
    folder.mkdir(parents=True)
    save_config(build("parity", {"benchmark": "parity", "tier": "smoke", "planted_layer": 2}), folder)
    save_result(folder, records(tables(["sdpa_flash", "bf16", "onnxruntime"])).result)
    page = html(Run(folder))
    assert len(page.encode()) < 400_000
    assert "These results come from the embedded stand-in model." in page
    assert "The output of encoder layer 2 was changed on purpose" in page
    drawn = re.findall(r'<figure id="([\w-]+)"', page)
    assert set(drawn) == set(DRAWN)
    headings = set(re.findall(r"<h2>([^<]+)</h2>", page))
    assert {
        "Outcomes",
        "Outcomes by quantity",
        "Beyond limits, or not compared",
        "Limits and their sources",
    } <= headings
    assert "Other runs and machines" not in headings  # there are none
    assert SKIPPED["onnxruntime"].split(":")[0] in page
    assert "one_minus_cosine" not in page  # raw tables are for programs


@pytest.mark.parametrize("values", [[1e-7], [2e-6, 8e-6], [0.0, 1e-5], [1e-12, 1e3]])
def test_an_axis_of_powers_has_more_than_one_tick(values):
    axes = Figure().subplots()
    pictures.powers(axes.yaxis, values)
    bottom, top = axes.get_ylim()
    assert sum(bottom <= tick <= top for tick in axes.get_yticks()) >= 2
