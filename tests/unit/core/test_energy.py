"""Energy and mean power from readings of every second, against what a device of known power takes."""

import pytest

from benchlib.core.energy import energy_j, mean_power_w


def readings(watts, counter=True, seconds=60):
    """Return a reading at each half of a second, 300 W before the half after second 30 and ``watts`` from then on."""
    total, events = 0.0, []
    for second in range(seconds):
        power = 300.0 if second < 30 else watts
        events.append({"kind": "sensor", "t": second + 0.5, "power_w": power, "energy_j": total if counter else None})
        total += 300.0 if second < 29 else (300.0 + watts) / 2 if second == 29 else watts
    return events


@pytest.mark.parametrize("span_s", [3.5, 10.2, 33.0])
@pytest.mark.parametrize("counter", [True, False])
def test_the_seconds_at_the_edges_count(span_s, counter):
    events = readings(300.0, counter)
    assert mean_power_w(events, 5.2, 5.2 + span_s) == (pytest.approx(300.0), "")
    energy, reason = energy_j(events, 5.2, 5.2 + span_s)
    assert (energy, reason) == (pytest.approx(300.0 * span_s), "") if counter else energy is None


@pytest.mark.parametrize("counter", [True, False])
def test_mean_power_is_no_typical_power(counter):
    """300 W for 60% of the time and 100 W for the rest are 220 W; their median is 300."""
    assert mean_power_w(readings(100.0, counter), 30.0 - 24.0, 30.0 + 16.0)[0] == pytest.approx(220.0)


def test_what_no_readings_enclose_is_not_known():
    events, reason = readings(300.0), "no readings of power_w both before its begin and after its end"
    for began, ended in ((0.4, 9.0), (50.0, 59.6), (9.0, 9.0)):
        assert mean_power_w(events, began, ended) == (None, reason)
    stated = [{"kind": "sensors", "t": 0.0, "availability": {"power_w": "no sensor", "energy_j": "no counter"}}]
    assert (mean_power_w(stated, 1.0, 2.0), energy_j(stated, 1.0, 2.0)) == ((None, "no sensor"), (None, "no counter"))
