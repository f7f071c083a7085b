from __future__ import annotations

import typer

from memfit.cli import options as o


def command(
    job: o.Job, set_: o.Set = None, device: o.DeviceName = None, budget: o.BudgetText = None, allow: o.Allow = None,
    json: o.Json = False, html: o.Html = None, lang: o.Lang = None, verbose: o.Verbose = False,
) -> None:  # fmt: skip
    """Predict one job as it stands: peak, what fills it, seconds."""
    o.choose_language(lang)
    o.quiet_libraries()
    from memfit import api
    from memfit.report import html as pages
    from memfit.report import terminal

    out, err = o.console(json), o.console(True)
    found = api.load_job(job, set_ or [], device=device, budget=budget, allow=allow or [])
    target, budget_bytes = o.prepare_device(found, err)
    with o.simulating(err):
        profile = api.estimate(found)
    if json:
        o.print_json(profile.to_json(budget_bytes))
    else:
        terminal.show_estimate(profile, budget_bytes, target, out)
    if html:
        from memfit.core.job import write_job

        pages.write_page(html, profile=profile, budget_bytes=budget_bytes, device=target, job_text=write_job(found),
                         environment=o.environment())  # fmt: skip
    raise typer.Exit(0 if profile.process_bytes <= budget_bytes else 1)
