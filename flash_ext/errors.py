"""The one exception that flash_ext raises for a call that it cannot take."""


class AttentionError(RuntimeError, ValueError):
    """A wrong argument, told in one sentence: the argument, what was seen, what is accepted.

    It is a ``RuntimeError`` because that is what PyTorch raises for the same mistakes, and a ``ValueError`` because
    that is what it means. Arguments of a wrong type raise ``TypeError``.
    """
