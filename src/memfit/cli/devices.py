from __future__ import annotations

from memfit.cli import options as o


def command(json: o.Json = False, lang: o.Lang = None) -> None:
    """List the devices that memfit knows, and what this machine is."""
    o.choose_language(lang)
    import msgspec

    from memfit.devices import table, this_machine
    from memfit.report import terminal

    mine = this_machine()
    if json:
        o.print_json(
            {
                "schema": 1,
                "devices": [msgspec.to_builtins(d) for d in table()],
                "this": msgspec.to_builtins(mine),
            }
        )
    else:
        terminal.show_devices(table(), mine, o.console(False))
