"""`python -m quicksilver …` is the command `quicksilver …`."""

import sys

from quicksilver.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
