"""transformers models from their configuration, with the batch that their task takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from gradstow._units import format_bytes
from gradstow.cli._input import InputError
from gradstow.cli._targets import construct, unknown

# Which of several heads a model gets: the first that it has. An encoder has a causal head, too, in
# transformers' tables, so that one comes later.
_TASKS = (
    ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", "AutoModelForSeq2SeqLM"),
    ("MODEL_FOR_MASKED_LM_MAPPING_NAMES", "AutoModelForMaskedLM"),
    ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "AutoModelForCausalLM"),
    ("MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES", "AutoModelForImageClassification"),
)


def build_transformer(
    text: str, name: str, options: dict[str, Any], batch: int, seq: int, image: int, attn: str | None
) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """A model with random weights and a batch with labels, so that its output has a ``.loss``."""
    import transformers
    from transformers.models.auto import modeling_auto

    transformers.logging.set_verbosity_error()  # its advice is about checkpoints and generating
    attn = options.pop("attn", attn)
    known = [n for table, _ in _TASKS for n in getattr(modeling_auto, table)]
    found = [auto for table, auto in _TASKS if name in getattr(modeling_auto, table)]
    if not found:
        raise unknown("transformers", name, dict.fromkeys(known))
    auto = getattr(transformers, found[0])
    config = _config(transformers.CONFIG_MAPPING[name], text, options)
    chosen = {} if attn is None else {"attn_implementation": attn}
    _refuse_too_large(text, lambda: auto.from_config(config, **chosen))
    model = construct(text, lambda: auto.from_config(config, **chosen))
    if "Image" in found[0]:
        size = getattr(config, "image_size", image)
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        pixels = torch.randn(batch, int(getattr(config, "num_channels", 3)), height, width)
        return model, {"pixel_values": pixels, "labels": torch.randint(0, config.num_labels, (batch,))}
    ids = torch.randint(0, _vocabulary(text, config), (batch, _length(text, config, seq)))
    return model, {"input_ids": ids, "labels": ids.clone()}


def _config(kind: Any, text: str, options: dict[str, Any]) -> Any:
    try:
        config = kind(**options)
    except Exception as error:  # each configuration checks in its own way
        raise InputError(f"{text} has no such configuration: {type(error).__name__}: {error}") from error
    unknown = [key for key in options if key not in kind().to_dict() and key not in kind.attribute_map]
    if unknown:
        raise InputError(f"{kind.__name__} has no option {unknown[0]!r}, so it would have no effect.")
    if hasattr(config, "use_cache"):  # keys and values for generating, which training does not need
        config.use_cache = False
    if getattr(config, "decoder_start_token_id", None) is None:  # what a decoder's inputs begin with
        config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0
    return config


def _vocabulary(text: str, config: Any) -> int:
    size = getattr(config.get_text_config(), "vocab_size", None)
    if not isinstance(size, int):
        raise InputError(f"{text} has no vocabulary, so its batch is not known here. Give file.py:make.")
    return size


def _length(text: str, config: Any, seq: int) -> int:
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    if seq < 1 or (isinstance(limit, int) and seq > limit):
        raise InputError(f"--seq {seq} does not fit {text}, which has {limit or 'any number of'} positions.")
    return seq


def _refuse_too_large(text: str, make: Any) -> None:
    """A default configuration may have billions of parameters: count them before allocating any."""
    free = _free_bytes()
    try:
        with torch.device("meta"):
            needed = sum(p.numel() * p.element_size() for p in make().parameters())
    except Exception:  # some models cannot be built without memory; then building tells
        return
    if free is not None and needed > free:
        raise InputError(
            f"{text} has {format_bytes(needed)} of parameters by default, and this machine has "
            f"{format_bytes(free)} free. Make it smaller, for example {text},num_hidden_layers=2."
        )


def _free_bytes() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return found[0] if found else None
