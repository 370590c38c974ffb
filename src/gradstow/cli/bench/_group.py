"""The tables as one group of commands."""

from __future__ import annotations

import typer

from gradstow.cli.bench import alexnet, batch_size, strategies, transformer

bench = typer.Typer(help="Measure strategies side by side.", no_args_is_help=True)


@bench.callback()
def _group() -> None:
    """Measure strategies side by side."""


bench.command("alexnet", epilog=alexnet.EXAMPLE)(alexnet.alexnet)
bench.command("batch-size", epilog=batch_size.EXAMPLE)(batch_size.batch_size)
bench.command("strategies", epilog=strategies.EXAMPLE)(strategies.strategies)
bench.command("transformer", epilog=transformer.EXAMPLE)(transformer.transformer)
