"""How far two processors are apart in each number format: the first batch of each committed record, scored again on this one.

`python scripts/measure_rounding.py` adds this processor, as its environment variables limit it, to docs/rounding.csv. The bounds of
quicksilver/runs/run.py are derived from that file (docs/identity.md).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pandas as pd

from quicksilver.report.artefacts import find
from quicksilver.report.reproduction import jobs_of
from quicksilver.runs.config import compose
from quicksilver.runs.context import RunContext
from quicksilver.runs.jobs import RecordIndex
from quicksilver.runs.parts import build_measurements
from quicksilver.runs.run import bench_of, compare, format_of, of_repository, plan, store_of, torch_threads
from quicksilver.runtime.errors import QuickSilverError
from quicksilver.runtime.quantized.proving import processor_key

ROOT = Path(__file__).resolve().parent.parent
TABLES = ("11", "peers", "quicksilver")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "rounding.csv")
    output = parser.parse_args().output
    here, place = processor_key("cpu"), RunContext()
    found: dict[str, tuple[str, str, float, float]] = {}
    for job in (job for name in TABLES for job in jobs_of(find("table", name), ["results_dir=results"], RecordIndex("results"))):
        if job.config is None and job.record is None:
            continue
        config = job.config or compose(job.overrides)
        try:
            step = plan([config], place).wanted[0]
            record = of_repository("results", step.fingerprint, build_measurements(config.measure))
            if record is None or record.fingerprint in found:
                continue
            with torch_threads(config.threads):
                bench, _ = bench_of(config, place, store_of(config))
                apart, work = compare(record, bench)
        except QuickSilverError as error:  # a text or a kernel that is not here
            print(f"{job.name}: {error}", file=sys.stderr)
            continue
        kernels = "; ".join(one.kernel.partition(" (")[0] for one in bench.modules if one.kernel)
        found[record.fingerprint] = (format_of(bench), kernels, apart, work)
        print(job.name, *found[record.fingerprint], flush=True)
    frame, of = pd.DataFrame(found.values(), columns=["format", "kernels", "nats", "work"]), ["format", "kernels"]
    summary = frame.groupby(of, as_index=False).agg(records=("nats", "size"), nats=("nats", "max"), work=("work", "max"))
    summary.insert(0, "processor", here)
    if output.is_file():
        before = pd.read_csv(output, keep_default_na=False)
        summary = pd.concat([before[before["processor"] != here], summary])
    summary.to_csv(output, index=False, float_format="%.2g")
    return 0


if __name__ == "__main__":
    sys.exit(main())
