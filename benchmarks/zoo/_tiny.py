"""Tiny configurations: what most of transformers call their sizes, made small."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from zoo._batches import IMAGE, WORDS, Batch
from zoo._subject import CLASSES

HIDDEN = 64

# What most configurations call their sizes; each is set where the configuration has it.
_SMALL: dict[str, Any] = {
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "dim", "emb_dim", "embedding_size", "word_embed_proj_dim"), HIDDEN
    ),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "num_decoder_layers"), 2),
    **dict.fromkeys(("intermediate_size", "d_ff", "n_inner", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_dim"), 128),
    **dict.fromkeys(("d_inner", "hidden_dim", "dff"), 128),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 64),
    "vocab_size": WORDS,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "d_kv": 16,
    "num_labels": CLASSES,
    "image_size": IMAGE,
    "decoder_start_token_id": 2,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "use_cache": False,
}


@dataclass(frozen=True)
class Tiny:
    """A class of transformers, its batch, and what its configuration gets beside ``_SMALL``.

    An option that is None leaves the library's own; ``{"config": make}`` makes the whole configuration.
    """

    kind: str
    batch: Batch
    options: dict[str, Any] = field(default_factory=dict)

    def config(self) -> Any:
        import transformers

        if "config" in self.options:
            return self.options["config"]()
        return tiny_config(getattr(transformers, self.kind).config_class, self.options)


def tiny_config(kind: Any, options: dict[str, Any]) -> Any:
    known = kind()
    small = {key: value for key, value in _SMALL.items() if _takes(known, key)}
    return kind(**{key: value for key, value in (small | options).items() if value is not None})


def _takes(known: Any, key: str) -> bool:
    if key == "decoder_start_token_id":
        return True
    return hasattr(known, key) and not isinstance(getattr(known, key), (list, tuple))


def part(kind: str, **options: Any) -> Any:
    """A part of a larger configuration."""
    import transformers

    return tiny_config(getattr(transformers, kind), options)
