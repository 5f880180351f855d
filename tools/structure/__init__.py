"""How the packages are built, in figures: ``python tools/structure`` prints the table.

``sources.py`` reads the sources (imports, folders, fields, docstrings, private names); ``budgets.py`` has the lines
that each package may have; ``walk.py`` runs a training step and writes down its files; ``main.py`` is the table.
"""
