"""Every performance figure in the documentation, and how to get it again.

`python -m benchmarks --list` names the benches, `python -m benchmarks NAME` runs one, and each module named
after a bench says what it measures and what must be true for the comparison to be fair.
"""
