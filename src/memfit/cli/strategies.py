from __future__ import annotations

from memfit.cli import options as o


def command(json: o.Json = False, lang: o.Lang = None) -> None:
    """List the memory strategies: what each changes, its options, whether it is exact."""
    o.choose_language(lang)
    from memfit.api import strategy_table
    from memfit.report import terminal

    if json:
        o.print_json({"schema": 1, "strategies": strategy_table()})
    else:
        terminal.show_strategies(strategy_table(), o.console(False))
