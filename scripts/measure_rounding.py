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
from quicksilver.runtime.errors import ConfigError, QuickSilverError
from quicksilver.runtime.quantized.proving import processor_key

ROOT = Path(__file__).resolve().parent.parent
RESULTS = str(ROOT / "results")
TABLES = ("11", "peers", "quicksilver")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "rounding.csv")
    output = parser.parse_args().output
    if not output.parent.is_dir():
        raise ConfigError(f"--output {output}: there is no folder {output.parent}. Make it first.")
    here, place = processor_key("cpu"), RunContext()
    found: dict[str, tuple[str, str, float, float]] = {}
    where, answers = [f"results_dir={RESULTS}"], RecordIndex(RESULTS)
    for job in (job for name in TABLES for job in jobs_of(find("table", name), where, answers)):
        if job.config is None and job.record is None:
            continue
        config = job.config or compose(job.overrides)
        try:
            step = plan([config], place).wanted[0]
            record = of_repository(RESULTS, step.fingerprint, build_measurements(config.measure))
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
    if not found:
        raise ConfigError(f"no record of {RESULTS} can be scored here: {output} stays as it was. Fetch the records first.")
    frame, of = pd.DataFrame(found.values(), columns=["format", "kernels", "nats", "work"]), ["format", "kernels"]
    summary = frame.groupby(of, as_index=False).agg(records=("nats", "size"), nats=("nats", "max"), work=("work", "max"))
    summary.insert(0, "processor", here)
    summary = summary.assign(**{name: summary[name].map("{:.2g}".format) for name in ("nats", "work")})
    if output.is_file():
        before = pd.read_csv(output, keep_default_na=False, dtype=str)  # rows of other processors stay as they are spelt
        summary = pd.concat([before[before["processor"] != here], summary])
    summary.to_csv(output, index=False)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except QuickSilverError as error:
        sys.exit(f"measure_rounding: {error}")
