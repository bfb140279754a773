"""Is serving a language model valid by MLPerf's rules, how fast is it, and how accurate?"""
