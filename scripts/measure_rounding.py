"""How far two processors are apart in each number format: the first batch of each committed record, scored again on this one.

`python scripts/measure_rounding.py` adds this processor, as its environment variables limit it, to docs/rounding.csv. The bounds of
quicksilver/harness/confirming.py are derived from that file (docs/identity.md).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pandas as pd

from quicksilver.harness import confirming
from quicksilver.harness.answers import Answers
from quicksilver.harness.config import compose
from quicksilver.harness.parts import build_measurements
from quicksilver.harness.run import _bench, _threads, plan, store_of
from quicksilver.harness.workplace import Workplace
from quicksilver.report.artefacts import find
from quicksilver.report.reproduction import jobs_of
from quicksilver.runtime.errors import QuickSilverError
from quicksilver.runtime.quantized.proving import processor_key

ROOT = Path(__file__).resolve().parent.parent
TABLES = ("11", "peers", "quicksilver")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "rounding.csv")
    output = parser.parse_args().output
    here, found, place = processor_key("cpu"), {}, Workplace()
    for table in TABLES:
        artefact = find("table", table)
        for job in jobs_of(artefact, ["results_dir=results"], Answers("results")):
            if job.config is None and job.record is None:
                continue
            config = job.config or compose(job.overrides)
            try:
                step = plan([config], place)[-1]
                record = confirming.of_repository("results", step.fingerprint, build_measurements(config.measure))
                if record is None or record.fingerprint in found:
                    continue
                with _threads(config.threads):
                    bench, _ = _bench(config, place, store_of(config))
                    apart, work = confirming.compare(record, bench)
            except QuickSilverError as error:  # a text or a kernel that is not here
                print(f"{job.name}: {error}", file=sys.stderr)
                continue
            found[record.fingerprint] = {
                "processor": here, "format": confirming.format_of(bench), "table": table, "row": job.name, "nats": float(f"{apart:.2g}"),
                "work": float(f"{work:.2g}"), "kernels": "; ".join(one.kernel for one in bench.modules if one.kernel),
            }  # fmt: skip
            print(*found[record.fingerprint].values(), sep=" | ", flush=True)
    before = pd.read_csv(output) if output.is_file() else pd.DataFrame()
    if len(before):
        before = before[before["processor"] != here]
    pd.concat([before, pd.DataFrame(found.values())]).to_csv(output, index=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
