"""``gradstow bench transformer``: sequence length against step peak, for eager attention, SDPA, and planned."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradstow.cli._input import InputError
from gradstow.cli._options import AsJson, check_budgets
from gradstow.cli._output import results
from gradstow.cli.bench import _columns as column
from gradstow.cli.bench._options import Csv, Rounds, Seed, Steps, check_counts, check_file
from gradstow.cli.bench._table import Table

if TYPE_CHECKING:
    from gradstow.cli._output import Meter
    from gradstow.cli.bench._contest import Contest, Way
    from gradstow.cli.bench._refused import Row

EXAMPLE = "Example: gradstow bench transformer --seq 128 --seq 512 --batch 2 --csv transformer.csv"
COLUMNS = (column.Column("seq", "seq", naming=True), column.WAY, *column.CONTEST)
# Bytes as tokens; without dropout in the attention, which no fused kernel of the CPU has.
_MODEL = "transformers:gpt2,n_layer=4,n_embd=256,n_head=8,vocab_size=256,attn_pdrop=0.0"


def transformer(
    seq: Annotated[
        list[int] | None,
        typer.Option("--seq", help="Tokens of a sequence: 128, 256, 512, 1024; may be given again."),
    ] = None,
    batch: Annotated[int, typer.Option("--batch", help="Sequences in a batch.")] = 4,
    model: Annotated[str, typer.Option("--model", help="transformers:NAME,option=value of a text model.")] = _MODEL,
    steps: Steps = 3,
    rounds: Rounds = 5,
    budget: Annotated[str, typer.Option("--budget", help="Of the planned rows.")] = "60%",
    seed: Seed = 0,
    out: Csv = None,
    as_json: AsJson = False,
) -> int:
    """A GPT-2 on English text: how its step peak grows with the sequence, and what attention and plans change."""
    with results(as_json) as emit:
        check_budgets(budget)
        lengths = list(dict.fromkeys(seq or [128, 256, 512, 1024]))
        check_counts(batch=batch, steps=steps, rounds=rounds, seq=min(lengths))
        check_file(out, COLUMNS)
        if not model.startswith("transformers:"):
            raise InputError(f"--model {model} is not of transformers. Write transformers:gpt2,n_layer=4.")
        contest = partial(_contest, model, batch, steps=steps, rounds=rounds, seed=seed)
        for length in lengths:  # all of them are refused before the first one takes time
            contest(length)
        settings = {"model": model, "data": "text", "batch": batch, "steps": steps, "seed": seed}
        table = Table("transformer", f"{model} on English text, batch {batch}", COLUMNS, settings, out)
        table.notes = [
            "time: of a step, as a ratio to eager attention at the same length",
            "a percentage is of the step peak of the same attention unplanned",
        ]
        kept: list[bool] = []
        table.measure(lambda meter: _rows(contest, lengths, _ways(budget), meter, kept), emit)
        return 0 if all(kept) else 1


def _rows(
    contest_of: Callable[[int], Contest], lengths: list[int], ways: list[Way], meter: Meter, kept: list[bool]
) -> Iterator[Row]:
    """The rows of each length; whether each kept its promises is added to ``kept``."""
    for number, length in enumerate(lengths):
        contest = contest_of(length)
        done = number * len(ways) * (contest.steps + contest.rounds)

        def tick(stage: str, more: int, total: int, done: int = done, length: int = length) -> None:
            meter(f"seq {length}, {stage}", done + more, total * len(lengths))

        for row in contest.run(ways, tick):
            yield {"seq": length, **row}
        kept.append(contest.kept_promises())


def _contest(text: str, batch: int, seq: int, steps: int, rounds: int, seed: int) -> Contest:
    from gradstow.cli._data import VOCABULARY, Order, open_set
    from gradstow.cli._targets import build_target
    from gradstow.cli._train_options import training_optimizer
    from gradstow.cli.bench._contest import Contest

    made = build_target(text, batch, seq=seq, attn="eager", seed=seed)
    if "input_ids" not in made.batch:
        raise InputError(f"--model {text} reads no tokens. Give a text model, such as transformers:gpt2.")
    config: Any = made.model.config
    if config.get_text_config().vocab_size < VOCABULARY:
        raise InputError(f"--model {text} has fewer tokens than text has bytes. Give vocab_size={VOCABULARY} or more.")
    samples = open_set("text", channels=1, side=1, seq=seq)
    order = Order(len(samples), batch, seed)

    def batch_of(step: int) -> Any:
        ids = samples.batch(order.numbers(step))[0]
        return {"input_ids": ids, "labels": ids}

    return Contest(
        model=made.model,
        batch=batch_of,
        call=lambda model, item: model(**item),
        loss=None,
        optimizer=lambda model: training_optimizer("adamw", model, None),
        steps=steps,
        rounds=rounds,
    )


def _ways(budget: str) -> list[Way]:
    from gradstow.cli.bench._contest import Way, nothing, planned

    def fused(model: Any) -> None:
        model.set_attn_implementation("sdpa")

    return [
        Way("eager", nothing),
        Way("SDPA", fused),
        planned("eager, planned", budget, like="eager"),
        planned("SDPA, planned", budget, like="SDPA", first=fused),
    ]
