"""Triton kernels without a GPU: their tests, run by Triton's interpreter in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def test_triton_kernels_in_the_interpreter():
    pytest.importorskip("triton")
    file = Path(__file__).with_name("triton_in_interpreter.py")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(file)]
    result = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, cwd=file.parent.parent
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-1000:]
    assert " passed" in result.stdout and "skipped" not in result.stdout
