"""The SQuAD v1.1 score as a local module of ``evaluate``; load it with ``benchlib.workloads.answers``."""
