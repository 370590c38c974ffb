"""Plan → code that runs inside the user's own training step."""

from gradstow.execute._executor import Executor

__all__ = ["Executor"]
