"""`make demo`: `python -m tailrace.demo`."""

from __future__ import annotations

import sys

from tailrace.demo.main import main

if __name__ == "__main__":
    sys.exit(main())
