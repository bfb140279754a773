"""Collective operations of the kit's own: exchanges made of messages, and groups of ranks that cannot talk to each other."""
