"""What the user asks of a plan, checked before anything takes time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gradstow._codes import CODES, EXACT
from gradstow._errors import PolicyError
from gradstow._units import Budget, parse_budget
from gradstow.actions import code_for
from gradstow.cost import Profile
from gradstow.offload import parse_place
from gradstow.planner import Effort, Policy

Progress = Callable[[str, int, int], None]
PolicyLike = str | Mapping[str, str] | Policy
LossyLike = str | float | None

CODE_GENERATORS = ("eager", "inductor")
ACTIONS = ("store", "recompute", "compress")


@dataclass(frozen=True, slots=True)
class Wanted:
    """How a step is to be planned.

    Attributes:
        budget: None plans without a limit.
        actions: what the planner may use.
        lossy: the code that it may use where numbers need not be exact, or None.
        offload: the place where values may wait for the backward, or None.
        profile: of a device that is not here.
        codegen: "eager" or "inductor".
        margin: bytes of the budget that are left free.
        cached: whether a plan that another process made will do.
    """

    budget: Budget | None = None
    policy: Policy = field(default_factory=Policy)
    actions: tuple[str, ...] = ACTIONS
    lossy: str | None = None
    offload: str | None = None
    effort: Effort = field(default_factory=Effort)
    profile: Profile | None = None
    progress: Progress | None = None
    codegen: str = "eager"
    margin: int = 0
    cached: bool = True

    @staticmethod
    def of(
        budget: object = None,
        policy: PolicyLike = "auto",
        actions: Sequence[str] = ACTIONS,
        lossy: LossyLike = None,
        offload: str | None = None,
        effort: str | Effort = "normal",
        profile: Profile | None = None,
        progress: Progress | None = None,
        codegen: str = "eager",
    ) -> Wanted:
        """From what the public functions take.

        Raises:
            BudgetError, PolicyError: with what there is.
        """
        rules, allowed = Policy.of(policy), _checked(actions)
        if "compress" not in allowed and any(action in ("compress", *EXACT, *CODES) for _, action in rules.rules):
            raise PolicyError(f"the rules {str(rules)!r} compress, and actions={allowed} leaves that out. Drop one.")
        unused = [name for name, value in (("lossy", lossy), ("offload", offload)) if value is not None]
        if rules.name != "auto" and not rules.rules and unused:
            raise PolicyError(
                f"the policy {rules.name!r} only stores and recomputes, and {unused[0]}= would change nothing. "
                "Leave it away, or plan with policy='auto'."
            )
        return Wanted(
            budget=None if budget is None else parse_budget(budget),
            policy=rules,
            actions=allowed,
            lossy=None if lossy is None else code_for(lossy),
            offload=None if offload is None else parse_place(offload),
            effort=Effort.of(effort),
            profile=profile,
            progress=progress,
            codegen=_code_generator(codegen),
        )

    def limited(self, budget: Budget | None) -> Wanted:
        """The same for another budget."""
        return replace(self, budget=budget)

    def place(self, action: str, device: str) -> str:
        """Where a rule's "offload", "host" or "disk" sends values: a folder is as ``offload=`` names it."""
        usual = self.offload or ("disk" if device == "cpu" and self.profile is None else "host")
        return usual if action in ("offload", usual.partition(":")[0]) else action

    def saying(self, stage: str) -> Wanted:
        """The same, where all progress is reported as that of one stage."""
        report = self.progress
        if report is None:
            return self
        return replace(self, progress=lambda _stage, done, total: report(stage, done, total))

    def say(self, stage: str, done: int, total: int) -> None:
        if self.progress is not None:
            self.progress(stage, done, total)


def _code_generator(name: str) -> str:
    if name not in CODE_GENERATORS:
        raise PolicyError(f"there is no codegen {name!r}. Choose {' or '.join(map(repr, CODE_GENERATORS))}.")
    return name


def _checked(actions: Sequence[str]) -> tuple[str, ...]:
    wrong = [str(name) for name in ([actions] if isinstance(actions, str) else actions) if name not in ACTIONS]
    if wrong or isinstance(actions, str) or "store" not in actions:
        what = f"{wrong[0]!r} is no action" if wrong else f"actions={actions!r} leaves out storing, or is no list"
        raise PolicyError(f"{what}. Give some of {ACTIONS}, 'store' among them.")
    return tuple(actions)
