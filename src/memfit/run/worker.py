"""``python -m memfit.run.worker FOLDER [data]``: a run's child process. Job and plan lie in the folder;
events go to standard output as JSON lines; what libraries say goes to standard error (the folder's
log.txt)."""

from __future__ import annotations

import sys

from memfit.core.errors import BadInput, MemfitError
from memfit.core.job import read_job
from memfit.core.words import set_language
from memfit.run.folder import RunFolder
from memfit.run.process import Tell, as_message, claim_stdout, die_with_parent, fail_loudly


def work(path: str, part: str, tell: Tell) -> None:
    """``part``: "data" fills the cache of tokens, "train" trains."""
    folder = RunFolder(path)
    job = read_job(folder.job_file)
    if part == "data":
        from memfit.run.streams import fill_cache

        fill_cache(job)
        return
    plan = folder.plan()
    if plan is None:
        raise BadInput("input.no_file", file=str(folder.path / "plan.full.json.gz"))
    from memfit.run.train import train

    train(job, plan, path, tell)


def main(arguments: list[str], tell: Tell) -> int:
    path, part, lang = arguments
    set_language(lang)
    try:
        work(path, part, tell)
    except MemfitError as error:
        tell(as_message(error))
        return error.exit_status
    except Exception as error:  # the process's edge
        failure = fail_loudly(error)
        tell(as_message(failure))
        return failure.exit_status
    return 0


if __name__ == "__main__":
    die_with_parent()
    sys.exit(main(sys.argv[1:], claim_stdout()))
