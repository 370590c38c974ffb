"""Hypothesis without deadlines (the machine is shared) and with the same examples in every run."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings

settings.register_profile(
    "gradstow",
    deadline=None,
    derandomize=True,
    max_examples=100,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],  # explaining a failure takes minutes
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
settings.load_profile("gradstow")
