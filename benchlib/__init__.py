"""benchlib: is a training and inference stack right, fast and worth its price?

Importing the package imports neither torch nor Jupyter; see ``benchlib.cli`` for the command line.
"""

__version__ = "0.4.0"
