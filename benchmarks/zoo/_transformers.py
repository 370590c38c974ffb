"""transformers architectures in tiny configurations, with the loss that they compute themselves."""

from __future__ import annotations

from zoo._architectures import ZOO
from zoo._subject import NotBuilt, Subject

HEAVY: tuple[str, ...] = ()


def names() -> list[str]:
    return list(ZOO)


def build(name: str) -> Subject:
    import transformers

    transformers.logging.set_verbosity_error()  # its advice is about checkpoints and generating
    tiny = ZOO.get(name)
    if tiny is None:
        raise NotBuilt(f"transformers:{name} is not in the zoo's list")
    config = tiny.config()
    return Subject(getattr(transformers, tiny.kind)(config).train(), tiny.batch(config), None)
