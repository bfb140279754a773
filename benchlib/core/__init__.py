"""What everything stands on: errors, files, events, the machine, sensors, statistics, the field's formulas."""
