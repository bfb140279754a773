"""Which way of spreading a model over devices is right here, how fast is each, and what holds the machine back?"""
