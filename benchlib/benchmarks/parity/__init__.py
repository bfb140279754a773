"""Does this backend compute the same, and if not, where?"""
