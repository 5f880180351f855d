"""Tools for people who debug: how a sharded model looks, in which order it runs, and where its time goes."""
