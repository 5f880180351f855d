"""The positions of parameters in a flat parameter: integers and no memory."""
