"""How fast does an encoder-decoder train here, and does the disk, the loader or the device set the pace?"""
