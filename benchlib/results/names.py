"""Names that stored runs of benchlib 0.1 have, and what they are called now. A renamed check gets a row here."""

CHECKS = {
    "files whole": "files intact",
    "the reference is one": "reference accuracy",
    "the tolerance can fail": "tolerance sensitivity",
    "no worse than the reference": "accuracy against double precision",
    "same numerics as accepted": "numerics unchanged",
}
