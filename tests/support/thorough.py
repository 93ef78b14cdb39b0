"""What takes long and is looked at in another way as well: it runs where there is time (`make matrix`, `make soak`)."""

from __future__ import annotations

import os

import pytest

THOROUGH = bool(os.environ.get("TAILRACE_THOROUGH"))
thorough = pytest.mark.skipif(not THOROUGH, reason="takes minutes: TAILRACE_THOROUGH=1")
