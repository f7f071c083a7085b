from __future__ import annotations

from typing import Annotated, Any

import typer

from memfit.cli import options as o

Folder = Annotated[
    str | None,
    typer.Option("--folder", metavar="DIR", help="Run folder (default: runs/NAME); resumes there."),
]


def command(
    job: o.Job, set_: o.Set = None, device: o.DeviceName = None, budget: o.BudgetText = None, allow: o.Allow = None,
    folder: Folder = None, json: o.Json = False, html: o.Html = None, lang: o.Lang = None, verbose: o.Verbose = False,
) -> None:  # fmt: skip
    """Plan, run and verify a training job inside the budget; resumes where it stopped."""
    o.choose_language(lang)
    o.quiet_libraries()
    from memfit import api
    from memfit.core.job import write_job
    from memfit.core.words import say
    from memfit.report import html as pages
    from memfit.report import terminal

    out, err = o.console(json), o.console(True)
    found = api.load_job(job, set_ or [], device=device, budget=budget, allow=allow or [])
    target, _ = o.prepare_device(found, err)
    with o.simulating(err) as count:
        made = api.plan(found, on_simulated=count)
    if not json:
        terminal.show_plan(made, out)
    with Progress(err) as tell:
        result = api.run(found, made, folder=folder, on_progress=tell)
    for note in result.notes:
        err.print(note, highlight=False, markup=False)
    if json:
        o.print_json(result.to_json())
    else:
        terminal.show_verdict(result.plan, result.measured, result.verdict, out)
        out.print(say("cli.folder", path=result.folder), highlight=False)
    page = {
        "plan": result.plan,
        "measured": result.measured,
        "verdict": result.verdict,
        "losses": list(result.losses),
    }
    for path in (html, f"{result.folder}/report.html"):
        if path:
            pages.write_page(path, budget_bytes=made.budget_bytes, device=target, job_text=write_job(found),
                             environment=o.environment(), **page)  # type: ignore[arg-type]  # fmt: skip
    raise typer.Exit(0 if result.verdict.within_budget else 1)


class Progress:
    """A progress bar of a run: loss, tokens per second, memory now, at its peak and the budget."""

    def __init__(self, console: Any) -> None:
        from rich import progress as bars

        self.bar = bars.Progress(bars.TextColumn("{task.description}"), bars.BarColumn(bar_width=20), bars.MofNCompleteColumn(),
                                 bars.TextColumn("{task.fields[shown]}"), bars.TimeRemainingColumn(), console=console)  # fmt: skip
        self.console = console
        self.task: Any = None

    def __enter__(self) -> Any:
        if self.console.is_terminal:
            self.bar.start()
        return self.tell

    def __exit__(self, *exception: Any) -> None:
        self.bar.stop()

    def tell(self, event: dict[str, Any]) -> None:
        from memfit.core.words import say

        if "step" not in event or "loss" not in event:
            return
        shown = say("cli.progress", loss=event["loss"], rate=event["items_per_second"], now=event["memory_bytes"],
                    peak=event["peak_bytes"], budget=event["budget_bytes"])  # fmt: skip
        if not self.console.is_terminal:  # a log gets one line for every tenth of the run
            every = max(1, event["steps"] // 10)
            if event["step"] % every == 0 or event["step"] in (1, event["steps"]):
                self.console.print(
                    f"{event['step']}/{event['steps']} {shown}", highlight=False, markup=False, soft_wrap=True
                )
            return
        if self.task is None:
            self.task = self.bar.add_task(say("cli.running"), total=event["steps"], shown="")
        self.bar.update(self.task, completed=event["step"], shown=shown)
