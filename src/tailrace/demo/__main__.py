"""`make demo`: `python -m tailrace.demo`. Ctrl-C is clean at any moment, also while modules are still loading."""

from __future__ import annotations

import sys

from tailrace.errors import ExitCode

if __name__ == "__main__":
    try:
        from tailrace.demo.main import main

        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(ExitCode.INTERRUPTED)
