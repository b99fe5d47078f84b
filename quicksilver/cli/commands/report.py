"""Write a site of everything that was made so far, to be opened in a browser; run nothing.

quicksilver report
quicksilver report results_dir=/folder

Keys: results_dir.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from quicksilver.cli.arguments import check_overrides
from quicksilver.runtime.errors import ConfigError


def main(words: Sequence[str]) -> int:
    """Write the site; say what is missing in it; returns the exit code.

    Raises:
        ConfigError: nothing was written yet, or a library is not installed.
    """
    overrides = check_overrides(words, "report")
    from quicksilver.runs.config import compose

    results_dir = compose(overrides).results_dir
    try:
        from quicksilver.report.site.collection import describe
        from quicksilver.report.site.pages import make
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] == "quicksilver":
            raise
        raise ConfigError(
            f"The report needs {error.name}, which is not installed: pip install 'quicksilver[report,plots]'."
        ) from error
    page, problems = make(results_dir)
    print(f"Written: {page}")
    if problems:
        print(f"Missing in it:\n{describe(problems)}", file=sys.stderr)
    return 1 if problems else 0
