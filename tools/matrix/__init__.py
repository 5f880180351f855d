"""The versions of torch and Python that flatparam is tested with, each in an environment of its own."""
