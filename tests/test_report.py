"""The reports: catalogues agree, the terminal says the figures, the page is self-contained and safe."""

from __future__ import annotations

import io
import json
import re
import string
import subprocess
import sys
import tomllib
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

import memfit
from memfit.core import words
from memfit.core.device import Device
from memfit.core.job import Job, Model, Task
from memfit.core.plan import Choice, Plan, Point, Question, Rejected, judge
from memfit.core.profile import Allocation, PeakAt, Phase, Profile
from memfit.report import palette, terminal
from memfit.report.figures import Words, clean, module_rows, scale_for, show_value, ticks
from memfit.report.html import render_page, write_page
from memfit.report.json import dumps, dumps_for_script

MIB, GIB = 2**20, 2**30
HOSTILE = 'model.<script>alert("x")</script>.\x1b[31m[red]evil'
LAYERS = 12


def make_profile(
    origin: str = "predicted", layers: int = LAYERS, kept: float = 1.0, names: str = "model.layers"
) -> Profile:
    """One training step by hand: weights and state, activations that grow and shrink, gradients that grow."""
    found: list[tuple] = []
    clock = 0
    end = 4 * layers + 20
    for i in range(layers):
        found.append((260 * MIB, "weights", f"{names}.{i}.mlp.up_proj", "load", "load", 0, end))
        found.append((120 * MIB, "weights", f"{names}.{i}.self_attn.q_proj", "load", "load", 0, end))
        found.append((380 * MIB, "optimizer", f"{names}.{i}", "_foreach_addcdiv", "optimizer", 0, end))
    found.append((300 * MIB, "weights", "model.embed_tokens", "load", "load", 0, end))
    found.append((2 * MIB, "inputs", "", "input", "load", 0, end))
    found.append((64 * MIB, "workspace", "", "cublas", "forward", 1, end))
    for i in range(layers):
        clock = 2 + i
        found.append(
            (
                int(500 * MIB * kept),
                "activations",
                f"{names}.{i}.mlp",
                "aten.mm",
                "forward",
                clock,
                2 * layers + 8 - i,
            )
        )
        found.append((90 * MIB, "temporaries", f"{names}.{i}", "aten.softmax", "forward", clock, clock + 1))
    found.append((700 * MIB, "temporaries", "lm_head", "aten.log_softmax", "forward", layers + 3, layers + 6))
    for i in range(layers):
        clock = 2 * layers + 8 - i - 1
        found.append(
            (
                190 * MIB,
                "gradients",
                f"{names}.{layers - 1 - i}",
                "aten.mm",
                "backward",
                layers + 7 + i,
                end - 2,
            )
        )
    found.append((40 * MIB, "temporaries", "", "_foreach_sqrt", "optimizer", end - 6, end - 4))
    allocations = tuple(Allocation(s, k, "device", m, o, p, b, d) for s, k, m, o, p, b, d in found)
    level, best, at = 0, 0, 0
    for index in range(end):
        level = sum(a.size for a in allocations if a.born <= index < a.died)
        if level > best:
            best, at = level, index
    return Profile(
        origin=origin,
        allocations=allocations,
        length=end,
        peak_bytes=best,
        peak_index=at,
        phases=(
            Phase(
                name="forward", start=0, stop=layers + 6, peak_bytes=best, end_bytes=best // 2, seconds=0.31
            ),
            Phase(
                name="backward",
                start=layers + 6,
                stop=2 * layers + 9,
                peak_bytes=best,
                end_bytes=best // 2,
                seconds=0.72,
            ),
            Phase(
                name="optimizer",
                start=2 * layers + 9,
                stop=end,
                peak_bytes=best // 2,
                end_bytes=best // 2,
                seconds=0.08,
            ),
        ),
        peak_at=PeakAt(phase="backward", module=f"{names}.{layers - 1}", op="aten.mm"),
        reserved_bytes=best + 300 * MIB,
        process_bytes=best + 900 * MIB,
        host_peak_bytes=3 * GIB,
        step_seconds=1.11,
        assumptions=("report.assumptions.none", "the mask is dense"),
    )


def make_plan(names: str = "model.layers", fits: bool = True) -> Plan:
    baseline, profile = make_profile(layers=LAYERS + 6, names=names), make_profile(kept=0.35, names=names)
    entries = ({"name": "checkpoint", "policy": "selective"}, {"name": "micro-batch", "size": 2})
    return Plan(
        job=Job(
            model=Model(name="glm-4-9b-chat", dtype="bfloat16"),
            task=Task(sequence_length=2048, global_batch=16),
        ),
        device="rtx-4090",
        budget_bytes=14 * GIB if fits else 9 * GIB,
        fits=fits,
        choices=(
            Choice(
                name="checkpoint",
                options={"policy": "selective"},
                fidelity="exact",
                saves_bytes=4 * GIB,
                costs_seconds=0.22,
                why="activations are 41 % of the peak; recomputing the attention blocks is the cheapest way",
            ),
            Choice(
                name="micro-batch",
                options={"size": 2},
                fidelity="exact",
                saves_bytes=2 * GIB,
                costs_seconds=-0.01,
                why="halves what a forward pass saves; 16 rows stay 16 rows",
                fixed=True,
            ),
        ),
        rejected=(
            Rejected(
                name="offload-optimizer",
                options={},
                why="fits, but the transfers over PCIe cost 2.1 s a step",
                peak_bytes=8 * GIB,
                step_seconds=3.4,
            ),
            Rejected(name="optimizer-8bit", options={"block": 256}, why="lossy, and not allowed"),
        ),
        questions=(
            Question(
                asked="Does the job fit as it stands?",
                answer="no",
                figures={"process_bytes": 21.3 * GIB, "budget_bytes": 14.0 * GIB},
            ),
            Question(
                asked="What fills the peak?",
                answer="activations",
                depth=1,
                figures={"activations_share": 0.41},
            ),
            Question(
                asked="Does recomputation free enough?",
                answer="yes, selective",
                depth=2,
                figures={"saves_bytes": 4.0 * GIB, "costs_seconds": 0.22},
            ),
            Question(asked="Is anything faster?", answer="no", depth=1, figures={"combinations": 48}),
        ),
        frontier=(
            Point(
                peak_bytes=8 * GIB,
                process_bytes=9 * GIB,
                step_seconds=1.9,
                strategies=({"name": "checkpoint", "policy": "full"},),
            ),
            Point(
                peak_bytes=profile.peak_bytes,
                process_bytes=profile.process_bytes,
                step_seconds=1.33,
                strategies=entries,
            ),
            Point(peak_bytes=16 * GIB, process_bytes=17 * GIB, step_seconds=1.2, strategies=entries[1:]),
            Point(peak_bytes=20 * GIB, process_bytes=21 * GIB, step_seconds=1.11, strategies=()),
        ),
        profile=profile,
        baseline=baseline,
        needs=() if fits else ("allow optimizer-8bit: 8.10 GiB",),
        simulations=48,
        seconds=1.73,
    )


DEVICE = Device(
    name="rtx-4090",
    title="NVIDIA GeForce RTX 4090",
    kind="cuda",
    architecture="sm_89",
    memory_bytes=24 * GIB,
    bandwidth=1.008e12,
    flops={"float32": 8.26e13, "bfloat16": 1.65e14},
    host_link=2.5e10,
)


@pytest.fixture(params=words.LANGUAGES)
def lang(request):
    words.set_language(request.param)
    yield request.param
    words.set_language(None)


def printed(show, *arguments, width: int = 80) -> str:
    out = io.StringIO()
    show(*arguments, Console(file=out, width=width))
    return out.getvalue()


# --- catalogues -------------------------------------------------------------------------------------------


def _placeholders(text: str) -> list[str]:
    return sorted(f for _, f, _, _ in string.Formatter().parse(text) if f is not None)


def _messages(file: Path) -> dict[str, str]:
    found: dict[str, str] = {}

    def walk(prefix: str, node: dict) -> None:
        for key, value in node.items():
            walk(f"{prefix}{key}.", value) if isinstance(value, dict) else found.update({prefix + key: value})

    walk("", tomllib.loads(file.read_text(encoding="utf-8")))
    return found


ROOT = Path(memfit.__file__).parent
CATALOGUES = sorted(
    {f.name for language in words.LANGUAGES for f in (ROOT / "words" / language).glob("*.toml")}
)


@pytest.mark.parametrize("name", CATALOGUES)
def test_catalogues_agree(name):
    english, chinese = (_messages(ROOT / "words" / language / name) for language in ("en", "zh"))
    assert english.keys() == chinese.keys()
    for key in english:
        assert _placeholders(english[key]) == _placeholders(chinese[key]), key


def test_no_key_in_two_files():
    seen: dict[str, str] = {}
    for name in CATALOGUES:
        for key in _messages(ROOT / "words" / "en" / name):
            assert key not in seen, f"{key} in {name} and {seen[key]}"
            seen[key] = name


# --- figures ----------------------------------------------------------------------------------------------


def test_module_rows_add_up_and_join_layers():
    profile = make_profile()
    rows = module_rows(profile, least=0.0)
    assert sum(r.size for r in rows if r.depth == 0) == profile.peak_bytes
    joined = next(r for r in rows if r.joined == LAYERS)
    assert joined.name.endswith(f"0–{LAYERS - 1}")


def test_scale_and_values():
    assert scale_for(22.8 * GIB).show(22.8 * GIB) == "22.80 GiB"
    assert scale_for(3 * MIB).unit == "MiB"
    assert show_value("peak_bytes", 2 * GIB) == "2.00 GiB"
    assert show_value("activations_share", 0.412) == "41.2 %"
    assert show_value("count", float("nan")) == "–"
    assert ticks(24.1) == [0, 10, 20]
    assert clean("a\x1b[31mb\x07\nc") == "a[31mb c"


def test_palette_has_contrast_on_both_pages():
    for colour in (*palette.COLOURS.values(), palette.BESIDE, palette.GOOD, palette.BAD, palette.WARN):
        for page in (palette.LIGHT_PAGE, palette.DARK_PAGE):
            assert palette.contrast(colour, page) >= 3, (colour, page)


def test_json_is_finite_and_script_safe():
    text = dumps({"a": float("nan"), "b": float("inf"), "c": make_profile().peak_at})
    assert json.loads(text)["a"] is None and json.loads(text)["b"] is None
    assert "<" not in dumps_for_script({"</script>": "<!--"})
    assert json.loads(dumps_for_script({"</script>": "<!--"})) == {"</script>": "<!--"}


# --- terminal ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [60, 80, 140])
def test_terminal_says_the_figures(lang, width):
    from rich.cells import cell_len

    plan, measured = make_plan(), make_profile("measured", kept=0.36)
    text = printed(terminal.show_estimate, plan.baseline, 24 * GIB, DEVICE, width=width)
    assert f"{plan.baseline.process_bytes / GIB:.2f} GiB" in text and "24.00 GiB" in text
    assert words.say("origin.predicted") in text
    text += printed(terminal.show_plan, plan, width=width)
    assert "4.00" in text and "checkpoint" in text and "offload-optimizer" in text and "21.30 GiB" in text
    verdict = judge(plan.profile, measured, plan.budget_bytes, steps=20, first_loss=5.1, last_loss=2.2)
    text += printed(terminal.show_verdict, plan, measured, verdict, width=width)
    assert f"{measured.peak_bytes / GIB:.2f} GiB" in text and words.say("origin.measured") in text
    assert "\x1b" not in text
    assert max(cell_len(line) for line in text.splitlines()) <= width


def test_terminal_catalogues(lang):
    text = printed(terminal.show_devices, [DEVICE], "rtx-4090")
    assert "rtx-4090" in text and "24.0" in text and words.say("origin.assumed") in text
    rows = [{"name": "glm-4-9b-chat", "parameters": 9_400_000_000, "layers": 40, "source": None}]
    assert "9.4 B" in printed(terminal.show_models, rows)
    rows = [{"name": "checkpoint", "fidelity": "exact", "targets": ("activations",), "summary": "recomputes"}]
    text = printed(terminal.show_strategies, rows)
    assert words.say("kind.activations") in text and words.say("report.fidelity.exact") in text


def test_terminal_ascii_and_hostile_names():
    plan = make_plan(names=HOSTILE, fits=False)
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="ascii", errors="replace")
    words.set_language("en")
    terminal.show_plan(plan, Console(file=out, width=80))
    out.flush()
    text = raw.getvalue().decode()
    assert "\x1b" not in text and "[red]evil" in text.replace("\n", "")
    assert not re.search(r"\?{3}", text)
    words.set_language(None)


def test_terminal_without_allocations():
    profile = make_profile()
    empty = Profile(
        origin="measured",
        allocations=(),
        length=0,
        phases=(),
        peak_bytes=profile.peak_bytes,
        peak_index=0,
        peak_at=PeakAt(phase="", module="", op=""),
        reserved_bytes=0,
        process_bytes=0,
    )
    assert f"{profile.peak_bytes / GIB:.2f} GiB" in printed(terminal.show_estimate, empty, 24 * GIB, "cpu")


def test_unknown_words_are_shown_as_they_are():
    w = Words("zh")
    assert w.of("phase", "warm-up") == "warm-up"
    assert w.told("nobody knows this {x}") == ("nobody knows this {x}", set())


# --- the page ---------------------------------------------------------------------------------------------

VOID = {"meta", "br", "link", "img", "input", "hr"}


class Page(HTMLParser):
    """Collects tags, attributes and scripts; checks that every element is closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.tags: list[str] = []
        self.text: list[str] = []
        self.scripts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == [], f"not closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, k, v or "") for k, v in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-1:]}"
        self.open.pop()

    def handle_data(self, data):
        (self.scripts if self.open and self.open[-1] == "script" else self.text).append(data)


def check_page(text: str) -> Page:
    page = Page(text)
    assert not re.search(r"@import|https?://|//[a-z]+\.[a-z]{2}", re.sub(r"^\s*//.*$", "", text, flags=re.M))
    for tag, name, value in page.attributes:
        assert name not in {"src", "srcset", "action", "formaction", "ping"}, (tag, name, value)
        assert not (name == "href" and not value.startswith("#")), (tag, name, value)
        assert not name.startswith("on"), (tag, name)
        assert "url(" not in value
    assert "url(" not in text
    assert page.tags.count("script") == 2
    json.loads(page.scripts[0])
    ids = [v for _, k, v in page.attributes if k == "id"]
    assert len(ids) == len(set(ids))
    return page


def a_run(**changes):
    plan, measured = make_plan(**changes), make_profile("measured", kept=0.36)
    verdict = judge(plan.profile, measured, plan.budget_bytes, steps=50, first_loss=5.1, last_loss=2.2)
    losses = [5.0 / (1 + i / 9) for i in range(50)]
    losses[7] = float("nan")
    return {"plan": plan, "measured": measured, "verdict": verdict, "losses": losses, "device": DEVICE}


def test_page_of_a_run(lang, tmp_path):
    run = a_run()
    file = write_page(
        tmp_path / "new" / "page.html",
        **run,
        job_text="[model]\nname = 'x'",
        environment={"torch": "2.13.0", "date": "2026-01-01"},
        lang=lang,
    )
    text = file.read_text(encoding="utf-8")
    page = check_page(text)
    seen = " ".join(page.text)
    for size in (run["plan"].profile.peak_bytes, run["measured"].peak_bytes, run["plan"].budget_bytes):
        assert f"{size / GIB:.2f} GiB" in seen
    for origin in ("predicted", "measured", "assumed"):
        assert words.say(f"origin.{origin}", lang=lang) in seen
    for key in ("verdict.heading", "questions.title", "rejected.title", "frontier.heading", "loss.heading"):
        assert Words(lang, DEVICE)(key) in seen
    assert "2.13.0" in seen and "NaN" not in seen and "offload-optimizer" in seen
    assert text.count("<svg") == 5  # the sign, two timelines, the frontier, the loss
    assert f'lang="{"zh-Hans" if lang == "zh" else "en"}"' in text


def test_page_language_is_its_own():
    words.set_language("en")
    try:
        text = render_page(profile=make_profile(), budget_bytes=16 * GIB, device=DEVICE, lang="zh")
    finally:
        words.set_language(None)
    assert "显存" in text and "Memory over one step" not in text


@pytest.mark.parametrize("budget", [4 * GIB, 20 * GIB, 600 * GIB])
def test_page_of_an_estimate(budget):
    page = check_page(render_page(profile=make_profile(), budget_bytes=budget, device="cpu", lang="en"))
    seen = " ".join(page.text)
    assert ("Fits" in seen) == (budget >= 20 * GIB)
    assert f"{budget / GIB:.2f} GiB" in seen


def test_page_of_a_plan_that_does_not_fit():
    page = check_page(render_page(plan=make_plan(fits=False), lang="en"))
    assert "allow optimizer-8bit: 8.10 GiB" in " ".join(page.text)


def test_page_with_little():
    empty = Profile(
        origin="measured",
        allocations=(),
        length=0,
        phases=(),
        peak_bytes=3 * MIB,
        peak_index=0,
        peak_at=PeakAt(phase="", module="", op=""),
        reserved_bytes=0,
        process_bytes=0,
    )
    check_page(render_page(profile=empty, budget_bytes=GIB, device="cpu", lang="en"))
    check_page(render_page(plan=make_plan(), measured=empty, losses=[1.0], lang="en"))
    with pytest.raises(ValueError, match="plan or a profile"):
        render_page()


def test_page_escapes_what_comes_from_outside():
    run = a_run(names=HOSTILE)
    nasty = (
        '</pre></script><script>alert(1)</script><img src="http://evil.example/x" onerror=alert(1)>\x1b[2J'
    )
    job = Job(model=Model(name=nasty))
    plan = msgspec.structs.replace(
        run["plan"],
        job=job,
        device=nasty,
        needs=(nasty,),
        questions=(Question(asked=nasty, answer=nasty, figures={nasty: 1.0}),),
        rejected=(Rejected(name=nasty, options={nasty: nasty}, why=nasty),),
        profile=msgspec.structs.replace(
            run["plan"].profile,
            assumptions=(nasty,),
            phases=(Phase(name=nasty, start=0, stop=60, peak_bytes=1, end_bytes=1),),
        ),
    )
    text = render_page(
        **{**run, "plan": plan, "device": nasty}, job_text=nasty, environment={nasty: nasty}, lang="en"
    )
    page = Page(text)
    assert page.tags.count("script") == 2 and "img" not in page.tags and "\x1b" not in text
    assert not any(name.startswith("on") for _, name, _ in page.attributes)
    json.loads(page.scripts[0])
    assert "<script>alert(" not in text and any(nasty[:10] in part for part in page.text)


def test_no_torch():
    code = "import sys, memfit.report.html, memfit.report.terminal; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
