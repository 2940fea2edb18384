"""The record of the machine that measurements were made on."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch


def describe_machine(device: str | torch.device = "cpu") -> dict[str, Any]:
    """Processor, cores, system, versions, and the commit if subquad runs from a checkout."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    device = torch.device(device)
    return {
        "processor": names[0] if names else platform.processor() or platform.machine(),
        "accelerator": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "subquad": version("subquad"),
        "commit": _commit(),
    }


def _commit() -> str | None:
    here = Path(__file__).parent
    try:
        done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
