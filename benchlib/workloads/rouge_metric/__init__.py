"""ROUGE as MLPerf computes it, as a local metric of ``evaluate``."""
