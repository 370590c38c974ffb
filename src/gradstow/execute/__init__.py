"""Plan → code that runs inside the user's own training step."""

from gradstow.execute._executor import Executor, inner_error

__all__ = ["Executor", "inner_error"]
