"""What the numbers of a SQuAD run say, in sentences, each with its ratio to a bound."""

from benchlib.metrics import Metric, quantity
from benchlib.published import placements, summary
from benchlib.references import registry
from benchlib.results import Result, Run
from benchlib.squad.config import SquadConfig


def reading(run: Run) -> list[str]:
    """Return sentences about learning, speed, exchange, published figures and what these must not be compared with."""
    config, result = run.config, run.result
    assert isinstance(config, SquadConfig) and result is not None
    share = float(result.facts.get("epoch_share", 1.0))
    found = [_learning(config, result, share), _speed(config, result), _split(result), _exchange(config, result)]
    return [sentence for sentence in [*found, summary(placements(run)), _validity(config, share)] if sentence]


def _value(result: Result, name: str) -> Metric | None:
    metric = result.metric(name)
    return metric if metric is not None and metric.value is not None else None


def _learning(config: SquadConfig, result: Result, share: float) -> str:
    scope = config.quality_scope(share)
    f1, match, first, last = (
        result.value(f"{name}{scope}") for name in ("f1", "exact_match", "loss_first", "loss_final")
    )
    if f1 is None or match is None or first is None or last is None:
        return ""
    return (
        f"The loss fell from {first:.3f} to {last:.3f}, and the model answers {match:.1f} % of the questions exactly (F1 {f1:.1f}). "
        f"The bound is 100; BERT-base reaches F1 {registry().figure('bert-base-f1-paper').text} on SQuAD v1.1."
    )


def _speed(config: SquadConfig, result: Result) -> str:
    rate, mfu, padding = (
        _value(result, name)
        for name in (f"train_samples_per_s{config.scope()}", f"mfu{config.scope()}", "padding_share")
    )
    if rate is None or rate.value is None:
        return ""
    text = f"Training takes {quantity(rate.value)} samples a second over {config.world_size} rank{'s' * (config.world_size > 1)}"
    if mfu is not None and mfu.value is not None:
        text += (
            f", {mfu.value:.1%} of the matrix-product rate that these ranks reach on this machine in {config.precision}"
        )
    if padding is not None and padding.value is not None:
        text += f"; {padding.value:.1%} of the processed tokens are padding"
    return text + "."


def _split(result: Result) -> str:
    parts = {name: result.value(f"time_{name}_s") for name in ("data", "forward", "backward", "exchange", "optimizer")}
    known = {name: value for name, value in parts.items() if value is not None}
    if len(known) < 2:
        return ""
    name, most = max(known.items(), key=lambda item: item[1])
    return f"Most of a step's time goes to {name}: {quantity(most, 's')} of the {quantity(sum(known.values()), 's')} that the parts take together."


def _exchange(config: SquadConfig, result: Result) -> str:
    rate, hidden = _value(result, "allreduce_gbps"), _value(result, "exchange_overlap")
    if rate is None or rate.value is None:
        return "One rank exchanges nothing." if config.world_size == 1 else ""
    text = f"The gradients travel at {quantity(rate.value)} Gbps of bus bandwidth"
    if hidden is not None and hidden.value is not None:
        text += f", and {hidden.value:.0%} of that time is hidden behind the backward pass"
    return text + "."


def _validity(config: SquadConfig, share: float) -> str:
    cut = f" The time budget cut the training to {share:.0%} of the planned samples." if share < 1 else ""
    if config.data == "minisquad":
        return (
            "The questions are generated: these figures count for the kit's own baselines, never for SQuAD v1.1." + cut
        )
    if config.quality_scope(share):
        return (
            "The training saw only a part of SQuAD v1.1, or another set: F1 is not comparable with published figures."
            + cut
        )
    return ""
