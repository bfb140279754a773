"""What is this machine, and what can it reach?"""
