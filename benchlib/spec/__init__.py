"""The engine of the specs: tables of rows, and what metrics, checks, sentences and pictures follow from their columns."""
