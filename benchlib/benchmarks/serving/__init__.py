"""How much load does this service take, and what does another worker add?"""
