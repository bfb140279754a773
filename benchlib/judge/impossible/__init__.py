"""Rules for numbers that cannot be true."""
