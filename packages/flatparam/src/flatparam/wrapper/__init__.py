"""The functions behind the methods of the wrapper, beside saving and loading: a module for each noun."""
