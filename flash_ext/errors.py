"""The one exception that flash_ext raises for a call that it cannot take."""

import torch


class AttentionError(RuntimeError, ValueError):
    """A wrong argument, told in one sentence: the argument, what was seen, what is accepted.

    It is a ``RuntimeError`` because that is what PyTorch raises for the same mistakes, and a ``ValueError`` because
    that is what it means. Arguments of a wrong type raise ``TypeError``.
    """


# One class for the process, kept where the operators are: who holds it from before the package was imported again still
# catches what is raised.
AttentionError = vars(torch.ops.flash_ext).setdefault("_error_class", AttentionError)
