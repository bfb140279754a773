"""What a run means: checks, gate, baselines, calibration, impossible numbers, references, trends."""
