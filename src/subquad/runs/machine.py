"""The machine that figures belong to."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch


def describe(device: str | torch.device = "cpu") -> dict[str, Any]:
    """Processor, cores, memory, versions, and the commit where this is a checkout."""
    cpuinfo = Path("/proc/cpuinfo")
    names = [line.split(":")[1].strip() for line in _lines(cpuinfo) if line.startswith("model name")]
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


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def _commit() -> str | None:
    here = Path(__file__).parent
    try:
        done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def free_memory() -> float:
    """Bytes that can be had without swapping; infinite where the system does not say."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable"):
                return int(line.split()[1]) * 1024.0
    if hasattr(os, "sysconf") and "SC_AVPHYS_PAGES" in os.sysconf_names:
        return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return float("inf")
