from __future__ import annotations

import typer

from memfit.cli import options as o


def command(
    job: o.Job, set_: o.Set = None, device: o.DeviceName = None, budget: o.BudgetText = None, allow: o.Allow = None,
    json: o.Json = False, html: o.Html = None, lang: o.Lang = None, verbose: o.Verbose = False,
) -> None:  # fmt: skip
    """Choose the strategies that fit the budget and cost least time, and say why."""
    o.choose_language(lang)
    o.quiet_libraries()
    from memfit import api
    from memfit.report import html as pages
    from memfit.report import terminal

    out, err = o.console(json), o.console(True)
    found = api.load_job(job, set_ or [], device=device, budget=budget, allow=allow or [])
    target, _ = o.prepare_device(found, err)
    with o.simulating(err) as count:
        made = api.plan(found, on_simulated=count)
    if json:
        o.print_json(made.to_json())
    else:
        terminal.show_plan(made, out)
    if html:
        from memfit.core.job import write_job

        pages.write_page(html, plan=made, budget_bytes=made.budget_bytes, device=target, job_text=write_job(found),
                         environment=o.environment())  # fmt: skip
    raise typer.Exit(0 if made.fits else 1)
