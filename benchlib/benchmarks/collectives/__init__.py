"""Does the fabric deliver what was paid for, and are its results right?"""
