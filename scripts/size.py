"""How large the project is, room by room, against its budget: `python scripts/size.py`. Exits with 1 when a budget is exceeded.

Lines and files of Python that git tracks. Standard library only.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CODE = ("quicksilver", "experiments", "scripts", "studies")
BUDGET_LINES = {"code": 36_000, "tests": 20_000}
BUDGET_FILES = 230  # of code


def room_of(path: str) -> str:
    """`quicksilver/runtime/run.py` belongs to `quicksilver/runtime`; a file outside of the package to its top folder."""
    parts = path.split("/")
    return "/".join(parts[:2]) if parts[0] == "quicksilver" and len(parts) > 2 else parts[0]


def measure(root: Path = ROOT) -> tuple[Counter[str], Counter[str]]:
    """(lines, files) of tracked Python by room."""
    listed = subprocess.run(["git", "ls-files", "-z", "*.py"], cwd=root, capture_output=True, text=True, check=True).stdout
    lines, files = Counter[str](), Counter[str]()
    for path in filter(None, listed.split("\0")):
        if (root / path).is_file():
            lines[room_of(path)] += len((root / path).read_bytes().splitlines())
            files[room_of(path)] += 1
    return lines, files


def main() -> int:
    lines, files = measure()
    for room in sorted(lines, key=lambda room: -lines[room]):
        print(f"{room:<26}{lines[room]:>8,} lines{files[room]:>6} files")
    exceeded = False
    for kind, tops in {"code": CODE, "tests": ("tests",)}.items():
        n_lines, n_files = (sum(n for room, n in found.items() if room.split("/")[0] in tops) for found in (lines, files))
        over = n_lines > BUDGET_LINES[kind] or (kind == "code" and n_files > BUDGET_FILES)
        exceeded |= over
        limit = f"{BUDGET_LINES[kind]:,} lines" + (f", {BUDGET_FILES} files" if kind == "code" else "")
        print(f"{kind}: {n_lines:,} lines in {n_files} files; budget {limit}: {'EXCEEDED' if over else 'kept'}")
    return int(exceeded)


if __name__ == "__main__":
    sys.exit(main())
