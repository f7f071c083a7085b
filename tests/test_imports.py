"""The structure rules hold on the tree, the checker can fail on each of them, light imports stay light."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import check_imports  # noqa: E402

GOOD = {
    "__init__.py": "",
    "core/__init__.py": "",
    "core/step.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\n",
    "devices/__init__.py": "import torch\n",
    "models/__init__.py": "from memfit.core import step\n",
    "strategies/__init__.py": "from memfit.core.step import *\n",
    "strategies/micro_batch.py": (
        'from typing import ClassVar\nclass MicroBatch:\n    name: ClassVar[str] = "micro-batch"\n'
    ),
    "strategies/offload.py": 'class Offload:\n    name = "offload"\n',
    "simulate/__init__.py": "import memfit.strategies\nfrom memfit import devices\n",
    "plan/__init__.py": "from ..simulate import *\n",
    "run/__init__.py": "",
    "report/__init__.py": "def chart() -> None:\n    import numpy\n",
    "api.py": "def plan() -> None:\n    from memfit import plan\n    from memfit import run\n",
    "cli/__init__.py": "",
    "cli/main.py": "import memfit\nfrom memfit import api\n",
}

BAD = {
    "upwards": ("devices/__init__.py", "from memfit.simulate import x\n", "against the order"),
    "upwards in a function": (
        "core/step.py",
        "def f():\n    import memfit.run\n",
        "core imports no other room",
    ),
    "upwards for types": (
        "models/__init__.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from memfit.plan import x\n",
        "against the order",
    ),
    "upwards by a relative import": ("simulate/__init__.py", "from ..api import plan\n", "against the order"),
    "the package itself from below": ("run/__init__.py", "import memfit\n", "against the order"),
    "verb rooms": ("run/__init__.py", "from memfit import plan\n", "rooms of one level"),
    "lower rooms": ("models/__init__.py", "from memfit.devices import x\n", "rooms of one level"),
    "unknown room": ("utils/__init__.py", "", "has no place in the order"),
    "strategy imports strategy": (
        "strategies/offload.py",
        "from memfit.strategies.micro_batch import MicroBatch\n",
        "strategies never import each other",
    ),
    "strategy imports strategy, relatively": (
        "strategies/offload.py",
        "def f():\n    from . import micro_batch\n",
        "strategies never import each other",
    ),
    "shelf names a file": ("strategies/__init__.py", "from . import offload\n", "it names none"),
    "heavy package in core": ("core/step.py", "def f():\n    import torch\n", "core needs no heavy package"),
    "heavy package in cli": (
        "cli/main.py",
        "try:\n    from torch import nn\nexcept ImportError:\n    pass\n",
        "is loaded",
    ),
    "heavy package in memfit": ("__init__.py", "import numpy as np\n", "is loaded when memfit is imported"),
    "heavy package in report": ("report/__init__.py", "class A:\n    import scipy.stats\n", "is loaded"),
    "heavy package through others": (
        "cli/main.py",
        "from memfit.plan import x\n",
        "through memfit.plan -> memfit.simulate -> memfit.devices",
    ),
    "strategy named": (
        "plan/__init__.py",
        'chosen = {"micro-batch": 1}\n',
        "names the strategy 'micro-batch'",
    ),
    "strategy named by plain assignment": (
        "run/__init__.py",
        'x = "offload"\n',
        "names the strategy 'offload'",
    ),
    "long file": ("models/__init__.py", "x = 1\n" * 401, "401 lines"),
}


def write(folder: Path, **changes: str) -> Path:
    for name, text in {**GOOD, **changes}.items():
        path = folder / "memfit" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_the_tree_keeps_the_rules() -> None:
    assert check_imports.violations(ROOT / "src") == []


def test_a_good_tree_passes(tmp_path: Path) -> None:
    assert check_imports.violations(write(tmp_path)) == []


@pytest.mark.parametrize("rule", BAD)
def test_each_rule_can_fail(rule: str, tmp_path: Path) -> None:
    name, text, message = BAD[rule]
    (found,) = check_imports.violations(write(tmp_path, **{name: text}))
    assert message in found
    assert found.startswith(str(tmp_path / "memfit" / name))


def test_a_marked_line_may_name_a_strategy(tmp_path: Path) -> None:
    text = 'x = "offload"  # names a strategy: an old job file\ny = "offload"  # not a strategy: a folder\n'
    assert check_imports.violations(write(tmp_path, **{"run/__init__.py": text})) == []


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check_imports.main([str(write(tmp_path))]) == 0
    assert capsys.readouterr().out == "import rules: held\n"
    write(tmp_path, **{"core/step.py": "import torch\n"})
    assert check_imports.main([str(tmp_path)]) == 1
    assert "import rules: 1 broken" in capsys.readouterr().out


def light_modules() -> list[str]:
    names = check_imports.read_tree(ROOT / "src")
    return [
        n for n in names if check_imports.room_of(n) in check_imports.LIGHT_ROOMS and n != "memfit.__main__"
    ]


def test_light_modules_load_nothing_heavy() -> None:
    """In a fresh interpreter: the package, core, cli and report, all of their files at once."""
    program = (
        "import importlib, sys\n"
        f"for name in {light_modules()!r}: importlib.import_module(name)\n"
        f"print(*sorted({set(check_imports.HEAVY)!r} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""
