from __future__ import annotations

from memfit.cli import options as o


def command(json: o.Json = False, lang: o.Lang = None) -> None:
    """List the models that memfit can build without weights, with their parameter counts."""
    o.choose_language(lang)
    from memfit.models import table
    from memfit.report import terminal

    if json:
        o.print_json({"schema": 1, "models": table()})
    else:
        terminal.show_models(table(), o.console(False))
