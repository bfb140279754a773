"""Collective libraries of the kit's own: exchanges made of messages, MPI, and groups of ranks that cannot talk to each other."""
