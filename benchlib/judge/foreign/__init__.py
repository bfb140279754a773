"""Readers of results that other programs wrote."""
