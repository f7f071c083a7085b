"""The options that commands share, and what every command does around its work."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

Job = Annotated[str, typer.Argument(metavar="JOB", help="Job file (TOML).", show_default=False)]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override the job file (repeatable)."),
]
DeviceName = Annotated[
    str | None, typer.Option("--device", metavar="NAME", help="Target device (see `memfit devices`).")
]
BudgetText = Annotated[
    str | None, typer.Option("--budget", metavar="24GiB", help="Memory of one device that may be used.")
]
Allow = Annotated[
    list[str] | None,
    typer.Option("--allow", metavar="STRATEGY", help="Accept a lossy strategy (repeatable)."),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output, nothing else there.")]
Html = Annotated[
    str | None, typer.Option("--html", metavar="FILE", help="Write a self-contained report page.")
]
Lang = Annotated[str | None, typer.Option("--lang", metavar="en|zh", help="Language of what people read.")]
Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="Say more on standard error.")]


def console(as_json: bool) -> Any:
    """Where people read: standard output, or standard error when standard output carries JSON."""
    from rich.console import Console

    return Console(stderr=as_json)


def choose_language(lang: str | None) -> None:
    from memfit.core.errors import BadInput
    from memfit.core.words import LANGUAGES, set_language

    if lang is not None:
        if lang not in LANGUAGES:
            raise BadInput("input.unknown_name", setting="--lang", value=lang, choices=", ".join(LANGUAGES))
        set_language(lang)


def quiet_libraries() -> None:
    """No progress bars, no advice, no network from the libraries underneath."""
    for name, value in {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1",
                        "TOKENIZERS_PARALLELISM": "false"}.items():  # fmt: skip
        os.environ.setdefault(name, value)
    import warnings

    warnings.filterwarnings("ignore", module=r"torch\..*|transformers\..*")


@contextmanager
def simulating(err: Any) -> Iterator[Any]:
    """A status line that counts simulations; gives the callback."""
    from memfit.core.words import say

    with err.status(say("cli.simulating", count=0)) as status:
        yield lambda count: status.update(say("cli.simulating", count=count))


def prepare_device(job: Any, err: Any) -> tuple[Any, int]:
    """The job's device and budget; says so when this machine is measured for the first time."""
    from memfit.api import target_of
    from memfit.core.words import say
    from memfit.devices.calibration import is_calibrated

    if (
        job.budget.device in ("auto", "cpu")
        and not is_calibrated()
        and not os.environ.get("MEMFIT_NO_CALIBRATION")
    ):
        err.print(say("device.calibrating"), highlight=False)
    return target_of(job)


def print_json(value: Any) -> None:
    from memfit.report.json import dumps

    sys.stdout.write(dumps(value) + "\n")


def environment() -> dict[str, str]:
    """Versions for a report."""
    import platform
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version()}
    for name in ("memfit", "torch", "transformers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
