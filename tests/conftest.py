"""What all tests share: a cache folder of their own, no network, two threads, the ``shared`` material.

``MEMFIT_TEST_CACHE=FOLDER`` keeps the cache (calibration, tokenized text) between runs.
``MEMFIT_SHARED=FOLDER`` says where the shared material lies if it is not beside the checkout.
"""

from __future__ import annotations

import ipaddress
import os
import shutil
import socket
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

ROOT = Path(__file__).parent.parent

# Set before anything imports torch or memfit, and inherited by every child process that a test starts.
_own_cache = None
if "MEMFIT_TEST_CACHE" not in os.environ:
    _own_cache = tempfile.mkdtemp(prefix="memfit-tests-")
    os.environ["MEMFIT_TEST_CACHE"] = _own_cache
os.environ["XDG_CACHE_HOME"] = os.environ["MEMFIT_TEST_CACHE"]
os.environ["HF_HUB_OFFLINE"] = os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "2"
os.environ.pop("MEMFIT_NO_CALIBRATION", None)  # speeds are measured, once per session, as they are for users
for _name in ("LC_ALL", "LC_MESSAGES", "LANG"):
    os.environ.pop(_name, None)
os.environ["LANG"] = "C.UTF-8"  # English messages, UTF-8 text

settings.register_profile("memfit", deadline=None)  # a busy machine is no failure
settings.load_profile("memfit")


def pytest_unconfigure() -> None:
    if _own_cache is not None:
        shutil.rmtree(_own_cache, ignore_errors=True)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The shared material (`../shared`: snapshots, measured figures, cases); skips the test without it."""
    folder = Path(os.environ.get("MEMFIT_SHARED", ROOT.parent / "shared"))
    if not folder.is_dir():
        pytest.skip("needs ../shared")
    return folder


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection to another machine fails (in this process; HF_HUB_OFFLINE holds the children)."""
    plain = socket.socket.connect

    def connect(self: socket.socket, address: Any) -> None:
        if self.family in (socket.AF_INET, socket.AF_INET6) and not _is_loopback(address[0]):
            raise RuntimeError(f"a test tried to reach the network: {address}")
        plain(self, address)

    monkeypatch.setattr(socket.socket, "connect", connect)


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
