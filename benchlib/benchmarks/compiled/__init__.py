"""Do other compilers give torch's numbers from StableHLO text, how fast, and after how many calls does compiling pay?"""
