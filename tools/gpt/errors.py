"""The one exception for what the user can put right."""


class UserError(Exception):
    """Something the user gave is wrong; the message is one sentence that says what to do. Shown without a traceback."""
