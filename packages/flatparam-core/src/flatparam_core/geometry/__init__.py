"""Where parameters lie in a flat parameter: integers and no memory."""
